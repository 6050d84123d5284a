"""ChaCha20 by its definition, over arrays, and the kernel compared with it. Needs neither a GPU's absence nor pytest:

PYTHONPATH=src python tests/secure_kernel.py cuda            # on a machine with CUDA
TRITON_INTERPRET=1 PYTHONPATH=src python tests/secure_kernel.py cpu
"""

import sys

import numpy as np
import torch

from dpscale.noise import kernel
from dpscale.noise.gaussian import standard_normal

CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")
ROUND = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
         (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]  # fmt: skip


def block_function(key, counters, nonce):
    """RFC 8439, 2.3: the words of a block for each counter, (blocks, 16)."""
    words = [*CONSTANTS, *np.frombuffer(key, dtype="<u4"), None, *np.frombuffer(nonce, dtype="<u4")]
    counters = np.asarray(counters, dtype=np.uint32)
    start = [counters if word is None else np.full_like(counters, word) for word in words]
    s = [word.copy() for word in start]
    for _ in range(10):
        for a, b, c, d in ROUND:
            for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                s[x] = s[x] + s[y]
                s[z] = s[z] ^ s[x]
                s[z] = (s[z] << np.uint32(turn)) | (s[z] >> np.uint32(32 - turn))
    return np.stack([one + other for one, other in zip(s, start, strict=True)], axis=1)


def stream(key, first, blocks):
    """What `chacha.words` says that a stream is."""
    numbers = range(first, first + blocks)
    found = []
    for high in dict.fromkeys(n >> 32 for n in numbers):
        counters = [n & 0xFFFFFFFF for n in numbers if n >> 32 == high]
        found.append(block_function(key, counters, high.to_bytes(4, "little") + bytes(8)))
    return np.concatenate(found)


def compare(device):
    """The kernel's words and sums against those of arrays; all to the bit."""
    key = bytes(range(100, 132))
    for first in (0, 5, 2**32 - 3, 2**41 + 7, 2**63 - 8):
        out = torch.full((300, 16), 7, dtype=torch.int32, device=device)
        blocks = 8 if first > 2**60 else 300
        kernel.words_(out[:blocks], key, first)
        assert np.array_equal(out[:blocks].cpu().numpy().view(np.uint32), stream(key, first, blocks)), first
        assert (out[blocks:] == 7).all()
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for first, count in ((0, 4096), (0, 1001), (3, 1000), (2**34 - 2, 999), (1, 1), (6, 2), (8, 70_000)):
            for std in (1.37, 1e-3):
                room = torch.randn(count + 2, dtype=dtype)
                sums, found = room[1:-1].clone(), room.to(device)
                shifted = found[1:-1]
                kernel.add_(shifted, key, first, std)
                blocks = stream(key, first // 4, count // 4 + 2)
                numbers = torch.from_numpy(standard_normal(blocks).reshape(-1)[first % 4 :][:count].copy())
                expected = (sums.double() + numbers * std).to(dtype)
                assert torch.equal(shifted.cpu(), expected), (dtype, first, count, std)
                assert found[0].item() == room[0].item() and found[-1].item() == room[-1].item()
                aligned = sums.to(device)
                kernel.add_(aligned, key, first, std)
                assert torch.equal(aligned.cpu(), expected), (dtype, first, count, std)


if __name__ == "__main__":
    compare(sys.argv[1])
    print("the kernel's integers and numbers are those of the definition, to the bit")
