"""Bandwidth of the streaming kernels beside the device-to-device copy's in the same run.

    python benchmarks/bandwidth.py [--tokens 65536,262144]

Bytes are what a kernel must read and write, each once: a gather that reads more loses by it. The
copy moves as many. Both are timed by the tuner's own protocol, in turns, with the L2 flushed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nsa_tune._errors import NsaTuneError
from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.bench.timing import interleave, timer_for
from nsa_tune.backend.hardware import detect
from nsa_tune.backend.kernels import combine_indices, concat_key, packed_fp8, v4_paged
from nsa_tune.backend.types.layouts import CONVERSIONS, KVLayout

_RANK, _ROPE = 512, 64
_V4_RANK = 448
_PAGE = 64
_POOL = 4
"""A pool has this many times the tokens of the batch."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One kernel on one amount of tokens."""

    name: str
    run: Callable[[], object]
    moved_bytes: int


def slots_of(tokens: int, page: int, device: torch.device) -> torch.Tensor:
    """[tokens] int32: whole pages from all over a pool, in a seeded random order."""
    generator = torch.Generator().manual_seed(1)
    pages = torch.randperm(_POOL * tokens // page, generator=generator)[: tokens // page]
    slots = pages[:, None] * page + torch.arange(page)
    return slots.flatten().int().to(device)


def _conversion(kernel: str, tokens: int, rank: int) -> int:
    (found,) = (one for one in CONVERSIONS if one.kernel == kernel)
    return found.moved_bytes(tokens, rank, _ROPE)


def packed_streams(tokens: int, device: torch.device) -> Iterator[Stream]:
    """The kernels of the packed fp8 layout."""
    latents = torch.randn(tokens, _RANK + _ROPE, device=device).to(torch.bfloat16)
    slots = slots_of(tokens, _PAGE, device)
    width = KVLayout.FP8_PACKED.token_bytes(_RANK, _ROPE)
    pool = torch.zeros(_POOL * tokens, width, dtype=torch.uint8, device=device)
    raw = torch.zeros(_POOL * tokens, _RANK + _ROPE, dtype=torch.uint8, device=device)
    values = raw.view(torch.float8_e4m3fn)
    yield Stream(
        "packed_fp8.dequantize",
        lambda: packed_fp8.dequantize(pool, slots, _RANK, _ROPE),
        _conversion("packed_fp8.dequantize", tokens, _RANK),
    )
    yield Stream(
        "packed_fp8.narrow",
        lambda: packed_fp8.narrow(pool, slots, _RANK, _ROPE),
        _conversion("packed_fp8.narrow", tokens, _RANK),
    )
    yield Stream(
        "packed_fp8.quantize",
        lambda: packed_fp8.quantize(latents, slots, pool, _RANK, _ROPE),
        _conversion("packed_fp8.quantize", tokens, _RANK),
    )
    yield Stream(
        "packed_fp8.requantize_raw",
        lambda: packed_fp8.requantize_raw(values, slots, pool, _RANK, _ROPE),
        _conversion("packed_fp8.requantize_raw", tokens, _RANK),
    )


def v4_streams(tokens: int, device: torch.device) -> Iterator[Stream]:
    """The kernels of the V4 layout, and its combined indices (512 extra ones a token)."""
    latents = torch.randn(tokens, _V4_RANK + _ROPE, device=device).to(torch.bfloat16)
    slots = slots_of(tokens, _PAGE, device)
    pool = v4_paged.empty_pool(_POOL * tokens // _PAGE, _PAGE, _V4_RANK, _ROPE, device)
    out = torch.empty_like(latents)
    yield Stream(
        "v4_paged.dequantize",
        lambda: v4_paged.dequantize(pool, slots, _PAGE, _V4_RANK, _ROPE, out),
        _conversion("v4_paged.dequantize", tokens, _V4_RANK),
    )
    yield Stream(
        "v4_paged.quantize",
        lambda: v4_paged.quantize(latents, slots, pool, _PAGE, _V4_RANK, _ROPE),
        _conversion("v4_paged.quantize", tokens, _V4_RANK),
    )
    window = torch.zeros(tokens, 128, dtype=torch.int32, device=device)
    extra = torch.zeros(tokens, 512, dtype=torch.int32, device=device)
    lengths = torch.full((tokens,), 128, dtype=torch.int32, device=device)
    more = torch.full((tokens,), 512, dtype=torch.int32, device=device)
    width = combine_indices.combined_width(128, 512)
    yield Stream(
        "combine_indices.combine_indices",
        lambda: combine_indices.combine_indices(window, lengths, extra, more, tokens),
        tokens * 4 * (128 + 512 + width + 3),
    )


def key_streams(tokens: int, device: torch.device) -> Iterator[Stream]:
    """The keys of expanded MHA at 16 heads: as many bytes a token as 128 heads an eighth of it."""
    heads, nope, v = 16, 128, 128
    expanded = torch.zeros(tokens, heads, nope + v, dtype=torch.bfloat16, device=device)
    rope = torch.zeros(tokens, _ROPE, dtype=torch.bfloat16, device=device)
    yield Stream(
        "concat_key.concat_key",
        lambda: concat_key.concat_key(expanded, rope, nope),
        tokens * 2 * (heads * nope + _ROPE + heads * (nope + _ROPE)),
    )


MAKERS = (packed_streams, v4_streams, key_streams)


def measure(tokens: int, device: torch.device) -> Iterator[dict[str, object]]:
    """One row a kernel."""
    timer = timer_for(device)
    for maker in MAKERS:
        for stream in maker(tokens, device):
            source = torch.empty(stream.moved_bytes // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)

            def launch(stream: Stream = stream, target: torch.Tensor = target) -> torch.Tensor:
                stream.run()
                return target

            def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> torch.Tensor:
                return target.copy_(source)

            launch()  # compiled before it is captured
            samplers = [timer.sampler(launch), timer.sampler(copy)]
            own, copied = interleave(samplers, timer)
            del samplers, source, target
            timer.release()
            rate = stream.moved_bytes / own.median_us / 1e3
            best = stream.moved_bytes / copied.median_us / 1e3
            yield {
                "kernel": stream.name,
                "tokens": tokens,
                "latency_us": round(own.median_us, 2),
                "gb_per_s": round(rate),
                "copy_gb_per_s": round(best),
                "of_copy": round(rate / best, 4),
            }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Bandwidth of the streaming kernels.")
    parser.add_argument("--tokens", default="65536,262144", help="comma-separated")
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:N")
    arguments = parser.parse_args()
    try:
        device = devices.pick_device(arguments.device)
    except NsaTuneError as error:
        parser.error(str(error))
    if device.type != "cuda":
        parser.error("the copy's bandwidth means something on a GPU only, and there is none")
    rows = [row for tokens in arguments.tokens.split(",") for row in measure(int(tokens), device)]
    libraries = dict(detect.library_versions())
    versions = ", ".join(f"{name} {libraries[name]}" for name in ("torch", "triton"))
    print(f"{devices.describe(device).name}, {versions}")
    print("| kernel | tokens | us | GB/s | copy GB/s | of copy |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['kernel']} | {row['tokens']} | {row['latency_us']} | {row['gb_per_s']} "
            f"| {row['copy_gb_per_s']} | {float(str(row['of_copy'])):.1%} |"
        )


if __name__ == "__main__":
    main()
