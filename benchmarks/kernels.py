"""The CUDA kernels against their plain twins: agreement, and time.

python benchmarks/kernels.py
"""

import torch

from dpscale.engine import kernels


def main() -> None:
    from triton.testing import do_bench

    torch.manual_seed(0)
    print(f"{'B,T,I,O':<22}{'dtype':<10}{'precision':<10}{'rel err':>9}{'kernel ms':>11}{'plain ms':>10}")
    for samples, t, i, o in [
        (16, 256, 768, 2304),
        (16, 256, 3072, 768),
        (64, 196, 384, 1536),
        (4, 77, 50, 33),
        (2, 1000, 64, 8),
    ]:
        for dtype in (torch.float32, torch.bfloat16):
            for tf32 in (False, True):
                torch.backends.cuda.matmul.allow_tf32 = tf32
                a = torch.randn(samples, t, i, device="cuda").to(dtype)
                g = torch.randn(samples, o, t, device="cuda").to(dtype).mT
                out, sizes = kernels.gram_norm2(a, g)
                exact, exact_sizes = kernels.gram_norm2_plain(a.double(), g.double())
                error = max((out / exact - 1).abs().max().item(), (sizes / exact_sizes - 1).abs().max().item())
                wide_a, wide_g = a.float(), g.float()
                ours = do_bench(lambda a=a, g=g: kernels.gram_norm2(a, g), return_mode="median")
                plain = do_bench(lambda a=wide_a, g=wide_g: kernels.gram_norm2_plain(a, g), return_mode="median")
                name = f"{samples},{t},{i},{o}"
                kind = f"{str(dtype)[6:]:<10}{'tf32' if tf32 else 'ieee':<10}"
                print(f"{name:<22}{kind}{error:>9.1e}{ours:>11.3f}{plain:>10.3f}")


if __name__ == "__main__":
    main()
