"""The double backward of batch norm in three kernels, for channels-last tensors on an NVIDIA or AMD GPU.

The same formulas as in kernels.py, where they are explained. Triton comes with PyTorch's GPU builds.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    _HAVE_TRITON = True
except ImportError:  # the CPU builds of PyTorch are without it
    _HAVE_TRITON = False

__all__ = ["available", "batch_norm_double_backward"]


def available(a: Tensor, x: Tensor, grad: Tensor) -> bool:
    """Whether these tensors are ones the kernels below take: on a GPU, channels last, of one layout and type."""
    return (
        _HAVE_TRITON
        and x.device.type == "cuda"
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() < 2**31
        and all(t.dtype == x.dtype and _channels_last(t) for t in (a, x, grad))
    )


def _channels_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.dim() == 2 and t.is_contiguous()


def batch_norm_double_backward(
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    gw: Tensor,
    gb: Tensor,
    needs_x: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cotangents (a, b, d) of (gx, gw, gb) to those of (grad, x, weight)."""
    channels = x.shape[1]
    rows = x.numel() // channels
    columns = min(64, triton.next_power_of_2(channels))
    height = 4096 // columns
    grid_c = triton.cdiv(channels, columns)
    blocks = max(1, min(triton.cdiv(rows, height), 512 // grid_c))
    partial = torch.empty(blocks, 3, channels, dtype=x.dtype, device=x.device)
    _sums[(blocks, grid_c)](a, grad, x, mean, rstd, gb, partial, rows, channels, R=height, C=columns)
    coefficients = torch.empty(7, channels, dtype=x.dtype, device=x.device)
    _coefficients[(triton.cdiv(channels, min(16, columns)),)](
        partial,
        b.contiguous() if b is not None else mean,
        d.contiguous() if d is not None else mean,
        weight if weight is not None else mean,
        mean,
        rstd,
        gw,
        gb,
        coefficients,
        rows,
        channels,
        blocks,
        HAS_B=b is not None,
        HAS_D=d is not None,
        HAS_W=weight is not None,
        B=64,
        C=min(16, columns),
    )
    out = torch.empty_like(grad)
    gx = torch.empty_like(x) if needs_x else out
    size = x.numel()
    _combine[(triton.cdiv(size, 1024),)](a, grad, x, coefficients, out, gx, size, channels, NEEDS_X=needs_x, BLOCK=1024)
    return out, (gx if needs_x else None), coefficients[6]


if _HAVE_TRITON:

    @triton.jit
    def _sums(
        a_ptr, g_ptr, x_ptr, mean_ptr, rstd_ptr, gb_ptr, out_ptr, rows, channels, R: tl.constexpr, C: tl.constexpr
    ):
        """Per block of rows: sum(a), sum(a xh), sum(a (grad - mean grad)), one number a channel."""
        c = tl.program_id(1) * C + tl.arange(0, C)
        live = c < channels
        mean = tl.load(mean_ptr + c, live, 0.0)
        rstd = tl.load(rstd_ptr + c, live, 0.0)
        g_mean = tl.load(gb_ptr + c, live, 0.0) / rows
        s0 = tl.zeros((R, C), mean.dtype)
        s1 = tl.zeros((R, C), mean.dtype)
        s2 = tl.zeros((R, C), mean.dtype)
        for start in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
            r = start + tl.arange(0, R)
            inside = (r[:, None] < rows) & live[None, :]
            place = r[:, None] * channels + c[None, :]
            a = tl.load(a_ptr + place, inside, 0.0)
            x = tl.load(x_ptr + place, inside, 0.0)
            g = tl.load(g_ptr + place, inside, 0.0)
            s0 += a
            s1 += a * (x - mean[None, :]) * rstd[None, :]
            s2 += a * (g - g_mean[None, :])
        at = out_ptr + tl.program_id(0) * 3 * channels + c
        tl.store(at, tl.sum(s0, 0), live)
        tl.store(at + channels, tl.sum(s1, 0), live)
        tl.store(at + 2 * channels, tl.sum(s2, 0), live)

    @triton.jit
    def _coefficients(
        partial_ptr,
        b_ptr,
        d_ptr,
        w_ptr,
        mean_ptr,
        rstd_ptr,
        gw_ptr,
        gb_ptr,
        out_ptr,
        rows,
        channels,
        blocks,
        HAS_B: tl.constexpr,
        HAS_D: tl.constexpr,
        HAS_W: tl.constexpr,
        B: tl.constexpr,
        C: tl.constexpr,
    ):
        """The two results are linear in a, x and grad: their coefficients, one row each; the last row is z."""
        c = tl.program_id(0) * C + tl.arange(0, C)
        live = c < channels
        mean = tl.load(mean_ptr + c, live, 0.0)
        r = tl.load(rstd_ptr + c, live, 0.0)
        s0 = tl.zeros((B, C), mean.dtype)
        s1 = tl.zeros((B, C), mean.dtype)
        s2 = tl.zeros((B, C), mean.dtype)
        for start in range(0, blocks, B):
            block = start + tl.arange(0, B)
            inside = (block[:, None] < blocks) & live[None, :]
            at = partial_ptr + block[:, None] * 3 * channels + c[None, :]
            s0 += tl.load(at, inside, 0.0)
            s1 += tl.load(at + channels, inside, 0.0)
            s2 += tl.load(at + 2 * channels, inside, 0.0)
        a_sum = tl.sum(s0, 0)
        a_xh = tl.sum(s1, 0)
        a_grad = tl.sum(s2, 0)
        w_r = r * tl.load(w_ptr + c, live, 0.0) if HAS_W else r
        q = tl.load(gw_ptr + c, live, 0.0) / rows
        g = tl.load(gb_ptr + c, live, 0.0) / rows
        p = a_xh / rows
        a_mean = a_sum / rows
        z = r * (a_grad - a_xh * q)
        k = -w_r * p
        if HAS_B:
            k += tl.load(b_ptr + c, live, 0.0)
        shift = -w_r * a_mean
        if HAS_D:
            shift += tl.load(d_ptr + c, live, 0.0)
        c_a = -w_r * r * q
        c_grad = k * r
        c_x = -(c_a * p + c_grad * q + w_r * z / rows) * r
        tl.store(out_ptr + c, w_r, live)  # out = w_r a + k r x + (shift - k r mean)
        tl.store(out_ptr + channels + c, k * r, live)
        tl.store(out_ptr + 2 * channels + c, shift - k * r * mean, live)
        tl.store(out_ptr + 3 * channels + c, c_a, live)  # gx = c_a a + c_grad grad + c_x x + constant; c_grad = k r
        tl.store(out_ptr + 4 * channels + c, c_x, live)
        tl.store(out_ptr + 5 * channels + c, -c_x * mean - c_a * a_mean - c_grad * g, live)
        tl.store(out_ptr + 6 * channels + c, z, live)

    @triton.jit
    def _combine(
        a_ptr,
        g_ptr,
        x_ptr,
        coefficient_ptr,
        out_ptr,
        gx_ptr,
        size,
        channels,
        NEEDS_X: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < size
        at = coefficient_ptr + i % channels
        a = tl.load(a_ptr + i, inside, 0.0)
        x = tl.load(x_ptr + i, inside, 0.0)
        k_r = tl.load(at + channels, inside, 0.0)
        out = tl.load(at, inside, 0.0) * a + k_r * x + tl.load(at + 2 * channels, inside, 0.0)
        tl.store(out_ptr + i, out, inside)
        if NEEDS_X:
            g = tl.load(g_ptr + i, inside, 0.0)
            gx = tl.load(at + 3 * channels, inside, 0.0) * a + k_r * g + tl.load(at + 4 * channels, inside, 0.0) * x
            tl.store(gx_ptr + i, gx + tl.load(at + 5 * channels, inside, 0.0), inside)
