"""The CUDA kernels: agreement with their plain twins, and time beside what a library takes for the like.

    python benchmarks/kernels.py

Times are those of a CUDA graph that is replayed. Beside `gram` stand cuBLAS's two Gram matrices of float32 operands,
beside `weigh` one matrix product or one weight gradient of cuDNN without weights, beside `square` and `keep` the same.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dpscale.engine import kernels
from dpscale.engine.kernels import Window

LINEAR = [(16, 256, 768, 2304), (16, 256, 3072, 768), (16, 256, 768, 50257), (64, 196, 384, 1152), (64, 196, 1536, 384)]
IMAGES = [(256, 64, 128, 64), (256, 128, 128, 32), (256, 128, 256, 32), (256, 256, 256, 16), (256, 256, 256, 8)]

Call = Callable[[], Tensor]


def linear() -> Iterator[tuple[str, str, Call, Call, Call]]:
    for samples, t, i, o in LINEAR:
        a = torch.randn(samples, t, i, device="cuda").bfloat16()
        g = kernels.aligned(torch.randn(samples, t, o, device="cuda").bfloat16())
        wide_a, wide_g, w = a.float(), g.float(), torch.rand(samples, device="cuda")
        name = f"linear {samples}×{t}, {i}→{o}"
        exact = lambda a=a, g=g: kernels.gram_norm2_plain(a.double(), g.double())[0]  # noqa: E731
        beside = lambda a=wide_a, g=wide_g: kernels.gram_norm2_plain(a, g)[0]  # noqa: E731
        yield name, "gram", lambda a=a, g=g: kernels.gram_norm2(a, g)[0], exact, beside
        yield name, "gram tf32", lambda a=wide_a, g=wide_g: kernels.gram_norm2(a, g)[0], exact, beside
        flat = g.flatten(0, 1), a.flatten(0, 1)
        yield (
            name, "weigh", lambda a=a, g=g, w=w: kernels.weigh(a.unsqueeze(1), g.unsqueeze(1), w),
            lambda a=wide_a, g=wide_g, w=w: kernels.weigh_wide(a.double(), g.double(), w),
            lambda flat=flat: torch.mm(flat[0].t(), flat[1]),
        )  # fmt: skip


REST = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
"""Stride, padding, dilation and so on of `convolution_backward`, for the gradient of the weight alone."""


def images() -> Iterator[tuple[str, str, Call, Call, Call]]:
    window = Window((3, 3), padding=(1, 1))
    for samples, i, o, size in IMAGES:
        x = torch.randn(samples, size, size, i, device="cuda").bfloat16()
        g = torch.randn(samples, size, size, o, device="cuda").bfloat16()
        w, weight = torch.rand(samples, device="cuda"), torch.zeros(o, i, 3, 3, device="cuda", dtype=torch.bfloat16)

        def beside(x: Tensor = x, g: Tensor = g, weight: Tensor = weight) -> Tensor:
            images = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)
            return torch.ops.aten.convolution_backward(*images, weight, None, *REST)[1]

        name = f"conv 3×3 {samples}×{size}², {i}→{o}"
        whole = lambda x=x, g=g: kernels.products_plain(x.float(), g.float(), window)  # noqa: E731
        squares = lambda f=whole: f().square().sum((1, 2, 3))  # noqa: E731
        yield name, "square", lambda x=x, g=g: kernels.square(x, g, window), squares, beside
        yield name, "keep", lambda x=x, g=g: kernels.keep(x, g, window), whole, beside
        summed = lambda f=whole, w=w: torch.einsum("b,btoc->toc", w, f())  # noqa: E731
        yield name, "weigh", lambda x=x, g=g, w=w: kernels.weigh(x, g, w, window), summed, beside


def main() -> None:
    from triton.testing import do_bench_cudagraph

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'operands':<32}{'kernel':<11}{'rel err':>9}{'kernel ms':>11}{'beside ms':>11}")
    for name, kind, ours, exact, beside in (*linear(), *images()):
        expected = exact().double()
        error = ((ours().double() - expected).norm() / expected.norm()).item()
        times = [do_bench_cudagraph(f, rep=20, return_mode="median") for f in (ours, beside)]
        print(f"{name:<32}{kind:<11}{error:>9.1e}{times[0]:>11.3f}{times[1]:>11.3f}", flush=True)


if __name__ == "__main__":
    main()
