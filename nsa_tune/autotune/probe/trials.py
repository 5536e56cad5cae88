"""Trials, one for each limit: they run a kernel at one size, and check its output.

Each call has a process of its own (`probe.child`), because a kernel behind its limit may end it.
"""

from __future__ import annotations

from time import perf_counter

import torch

from nsa_tune.autotune.bench import devices
from nsa_tune.autotune.probe.child import Target, WrongAnswer
from nsa_tune.backend import libraries
from nsa_tune.backend.kernels import packed_fp8
from nsa_tune.backend.kernels.mqa_schedule import mqa_schedule_reference
from nsa_tune.backend.libraries.deep_gemm import calls as deep_gemm
from nsa_tune.backend.libraries.flash_mla import calls as flash_mla
from nsa_tune.backend.libraries.flash_mla.limits import padded_heads
from nsa_tune.backend.points.indexer_layout.case import IndexerCase
from nsa_tune.backend.types.batch import Batch
from nsa_tune.backend.types.profiles import profile_of

_SLOTS = 4096
"""Tokens in the pool."""
_CHECKED_AT_ONCE = 64
"""Rows that are compared with the reference at once, to save memory."""
_SCHEDULED_KEYS = 64
"""Keys of each row: few, so that the schedule takes most of the time."""
_SLOW = 1.5
"""Time per row, over that of an eighth of the rows, at which a size is behind the limit."""
_CANARY_BYTES = 12 * 2**30
_CANARY = 0x5A
"""The byte that fills the memory which the kernel must not write to."""


def deep_gemm_loads(size: int, target: Target) -> dict[str, float]:
    """A control: DeepGEMM is imported and `size` bytes of the device are used, nothing else."""
    return _loads("deep_gemm", size, target)


def flash_mla_loads(size: int, target: Target) -> dict[str, float]:
    """The same for FlashMLA."""
    return _loads("flash_mla", size, target)


def _loads(library: str, size: int, target: Target) -> dict[str, float]:
    libraries.load(library)
    used = torch.ones(size, dtype=torch.uint8, device=target.device)
    return {"bytes": float(used.sum())}


def metadata_rows(size: int, target: Target) -> dict[str, float]:
    """DeepGEMM's metadata kernel over `size` rows; every bit must be the reference's."""
    device = torch.device(target.device)
    generator = torch.Generator().manual_seed(size)
    lens = torch.randint(1, 100000, (size, 1), generator=generator, dtype=torch.int32).to(device)
    given = deep_gemm.schedule(lens, profile_of(target.model).page_size)
    split = deep_gemm.schedule_split(devices.describe(device).arch)
    torch.cuda.synchronize(device)
    if not torch.equal(given, mqa_schedule_reference(lens, deep_gemm.sms(), split)):
        raise WrongAnswer(f"the metadata of {size} rows is not the reference's")
    return {}


def next_n(size: int, target: Target) -> dict[str, float]:
    """DeepGEMM's paged logits with next_n = `size` queries for each row."""
    device = torch.device(target.device)
    setting = devices.setting_of(device, target.model, target.heads, target.kv_dtype)
    batch = Batch.verify([5000, 700, 64], size) if size > 1 else Batch.decode([5000, 700, 64])
    case = IndexerCase(batch, setting, device)
    plan = deep_gemm.schedule(case.context_lens, case.profile.page_size)
    out = deep_gemm.paged_mqa_logits(
        case.q, case.pool, case.weights, case.context_lens, case.block_table, plan,
        case.max_context,
    )  # fmt: skip
    error = case.error_of(out)
    if error > case.tolerance:
        raise WrongAnswer(f"relative error {error:.3g} with {size} queries a row")
    return {"error": error}


def schedule_rows(size: int, target: Target) -> dict[str, float]:
    """FlashMLA's schedule and decode kernel: time per row of `size` rows and of an eighth of them.

    Behind the limit a row takes more than 1.5 times as long; that raises WrongAnswer.
    """
    operands = _decode_operands(size, target, _SCHEDULED_KEYS)
    few = tuple(part[: max(size // 8, 1)].contiguous() for part in (operands[0], operands[2]))
    pool, scale = operands[1], profile_of(target.model).softmax_scale
    whole_us = _microseconds(operands[0], pool, operands[2], scale)
    few_us = _microseconds(few[0], pool, few[1], scale)
    if whole_us / size > _SLOW * few_us / few[0].shape[0]:
        raise WrongAnswer(
            f"{size} rows take {whole_us:.1f} us, {few[0].shape[0]} take {few_us:.1f}"
        )
    return {"us": whole_us}


def schedule_time(size: int, target: Target) -> dict[str, float]:
    """Microseconds of FlashMLA's schedule and decode kernel over `size` rows of 64 keys."""
    q, pool, indices = _decode_operands(size, target, _SCHEDULED_KEYS)
    return {"us": _microseconds(q, pool, indices, profile_of(target.model).softmax_scale)}


def decode_rows(size: int, target: Target) -> dict[str, float]:
    """FlashMLA's decode kernel over `size` rows: right results, and no write outside its memory.

    An int32 offset that overflows points below the scratch memory. A buffer of known bytes is
    allocated there first, because results may be right although other memory was overwritten.
    """
    device = torch.device(target.device)
    free, _ = torch.cuda.mem_get_info(device)
    canary = torch.full((min(_CANARY_BYTES, free // 5),), _CANARY, dtype=torch.uint8, device=device)
    profile = profile_of(target.model)
    q, pool, indices = _decode_operands(size, target, profile.index_topk)
    scale = profile.softmax_scale
    out = flash_mla.sparse_decode(q, pool, indices, scale, flash_mla.new_schedule())[:, 0]
    torch.cuda.synchronize(device)
    latents = packed_fp8.dequantize_reference(
        pool.view(torch.uint8).view(_SLOTS, -1), torch.arange(_SLOTS, device=device), profile.rank,
        profile.rope,
    )  # fmt: skip
    rows = torch.unique(torch.linspace(0, size - 1, 256).long())
    rows = torch.unique(torch.cat((rows, torch.arange(max(size - 256, 0), size)))).to(device)
    worst = 0.0
    for part in rows.split(_CHECKED_AT_ONCE):
        keys = latents[indices[part, 0].long()].float()
        scores = torch.einsum("rhc,rkc->rhk", q[part, 0].float(), keys) * scale
        wanted = torch.einsum("rhk,rkc->rhc", scores.softmax(-1), keys[..., : profile.rank])
        errors = (out[part].float() - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        worst = max(worst, float(errors.nan_to_num(float("inf")).max()))
    if worst > 0.02:
        raise WrongAnswer(f"relative error {worst:.3g} with {size} rows")
    if any(bool((part != _CANARY).any()) for part in canary.split(2**28)):
        raise WrongAnswer(f"{size} rows write to memory outside their buffers")
    return {"error": worst}


def _decode_operands(
    size: int, target: Target, topk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of the decode kernel, random but the same for the same size.

    Returns q [size, 1, padded heads, 576] bf16, the packed fp8 pool [pages, page size, 1, bytes]
    and selected tokens [size, 1, topk] int32.
    """
    device, profile = torch.device(target.device), profile_of(target.model)
    generator = torch.Generator(device=device).manual_seed(size)
    heads = padded_heads(target.heads) or 128
    latents = torch.randn(_SLOTS, profile.latent, generator=generator, device=device)
    packed = packed_fp8.quantize_reference(latents.to(torch.bfloat16), profile.rank)
    pool = packed.view(torch.float8_e4m3fn).view(-1, profile.page_size, 1, packed.shape[1])
    q = torch.empty(size, 1, heads, profile.latent, dtype=torch.bfloat16, device=device)
    for part in q.split(4096):
        part.normal_(generator=generator)
    indices = torch.empty(size, 1, topk, dtype=torch.int32, device=device)
    for part in indices.split(4096):
        part.random_(0, _SLOTS, generator=generator)
    return q, pool, indices


def _microseconds(
    q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float
) -> float:
    """The shortest of five launches in microseconds; each computes its schedule anew."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize(q.device)
        started = perf_counter()
        flash_mla.sparse_decode(q, pool, indices, scale, flash_mla.new_schedule())
        torch.cuda.synchronize(q.device)
        times.append((perf_counter() - started) * 1e6)
    return min(times[1:])
