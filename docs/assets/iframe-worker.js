// Search in a folder of pages, without a server and without a network.
//
// Browsers start no worker from file://. There the theme's search runs in a hidden frame instead, which has the same
// few methods. The theme's offline plugin would load a script for this from the network, unless one of this name is
// there.
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.started = new Promise((resolve, reject) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
          const script = inside.document.createElement("script")
          script.onload = () => resolve(inside)
          script.onerror = () => reject(new Error(`${url} cannot be read.`))
          script.src = new URL(url, document.baseURI).href
          inside.document.head.append(script)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.started.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) })),
      )
    }
  }
  window.Worker = window.IFrameWorker = FrameWorker
}
