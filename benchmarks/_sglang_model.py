"""One attention layer around SGLang's real backend: a pool, random weights, and its passes."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks._sglang_engine import BACKEND

__all__ = ["TOPK", "Model"]

RANK, NOPE, ROPE, V, TOPK, PAGE = 512, 128, 64, 128, 2048, 64


class Pool:
    """A packed fp8 pool, as far as the backend asks for one."""

    dsa_kv_cache_store_fp8 = True
    kv_cache_dim = 656
    dtype = torch.float8_e4m3fn
    page_size = PAGE

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.size = tokens
        shape = (tokens + PAGE, 1, self.kv_cache_dim)
        self.bytes = torch.zeros(shape, dtype=torch.uint8, device=device)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """All rows [tokens, 1, 656] e4m3."""
        return self.bytes.view(self.dtype)

    def set_mla_kv_buffer(
        self, layer: Any, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Quantize with SGLang's kernel and store."""
        quantize = import_module("sglang.srt.layers.attention.dsa.quant_k_cache").quantize_k_cache
        rows = torch.cat((latent.view(-1, 1, RANK), rope.view(-1, 1, ROPE)), dim=-1)
        self.bytes[slots] = quantize(rows.unsqueeze(1)).squeeze(1).view(torch.uint8)


class Model:
    """One attention layer with random weights, and a backend built for it."""

    def __init__(self, device: torch.device, *, heads: int, tokens: int, longest: int) -> None:
        self.device, self.heads = device, heads
        self.random = torch.Generator(device).manual_seed(7)
        self.w_uk = self.normal(self.heads, NOPE, RANK) * RANK**-0.5
        self.w_uv = self.normal(self.heads, RANK, V) * RANK**-0.5
        self.pool = Pool(tokens, device)
        table = torch.zeros(128, longest, dtype=torch.int32, device=device)
        self.requests = SimpleNamespace(size=128, req_to_token=table)
        config = SimpleNamespace(
            hf_config=SimpleNamespace(index_topk=TOPK), context_len=longest,
            num_attention_heads=self.heads, qk_nope_head_dim=NOPE, kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
        )  # fmt: skip
        arguments = SimpleNamespace(
            enable_deterministic_inference=False, dsa_prefill_backend="flashmla_kv",
            dsa_decode_backend="flashmla_kv", dsa_topk_backend="sgl-kernel",
            speculative_eagle_topk=1, speculative_num_draft_tokens=2, chunked_prefill_size=8192,
            dsa_paged_mqa_logits_backend="auto",
        )  # fmt: skip
        runner = SimpleNamespace(
            device=str(device), page_size=PAGE, server_args=arguments, model_config=config,
            token_to_kv_pool=self.pool, req_to_token_pool=self.requests,
            hisparse_coordinator=None, kv_cache_dtype=self.pool.dtype,
        )  # fmt: skip
        self.module = import_module(BACKEND)
        self.modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.backend = self.module.DeepseekSparseAttnBackend(runner)
        attributes = ("_nsa_tune_prefill", "_nsa_tune_indexer")
        self.steered = {name: hasattr(self.backend, name) for name in attributes}

    def normal(self, *shape: int) -> torch.Tensor:
        """Random numbers, the same in both processes."""
        return torch.randn(
            *shape, generator=self.random, device=self.device, dtype=torch.float32
        ).to(torch.bfloat16)

    def layer(self, absorbed: bool) -> Any:
        """The layer as RadixAttention describes it."""
        head, value = (RANK + ROPE, RANK) if absorbed else (NOPE + ROPE, V)
        return SimpleNamespace(
            layer_id=0, is_cross_attention=False, tp_q_head_num=self.heads, head_dim=head,
            tp_k_head_num=1 if absorbed else self.heads, tp_v_head_num=self.heads,
            v_head_dim=value, scaling=(NOPE + ROPE) ** -0.5, logit_cap=0.0,
        )  # fmt: skip

    def batch(self, lens: list[tuple[int, int]], mode: str) -> Any:
        """A forward batch whose prefixes are in the pool, in pages in no order."""
        pages = torch.randperm(self.pool.size // PAGE, generator=self.random, device=self.device)
        at, slots = 0, []
        for i, (prefix, new) in enumerate(lens):
            count = -(-(prefix + new) // PAGE)
            own = pages[at : at + count, None] * PAGE + torch.arange(PAGE, device=self.device)
            self.requests.req_to_token[i, : prefix + new] = own.flatten()[: prefix + new].int()
            slots.append(own.flatten()[prefix : prefix + new])
            if prefix:
                latent, rope = self.normal(prefix, RANK), self.normal(prefix, ROPE)
                self.pool.set_mla_kv_buffer(None, own.flatten()[:prefix], latent, rope)
            at += count
        prefixes, news = [p for p, _ in lens], [n for _, n in lens]
        verify = mode == "TARGET_VERIFY"
        context = prefixes if verify else [p + n for p, n in lens]
        lens_cpu = torch.tensor(context)
        return SimpleNamespace(
            forward_mode=self.modes[mode], batch_size=len(lens), seq_lens_cpu=lens_cpu,
            seq_lens=lens_cpu.to(self.device), seq_lens_sum=sum(context), spec_info=None,
            req_pool_indices=torch.arange(len(lens), device=self.device),
            extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=news,
            extend_seq_lens=torch.tensor(news, device=self.device), extend_num_tokens=sum(news),
            out_cache_loc=torch.cat(slots), global_num_tokens_cpu=None, attn_cp_metadata=None,
            tbo_children=None, tbo_parent_token_range=None, get_max_chunk_capacity=lambda: 131072,
        )  # fmt: skip

    def selected(self, batch: Any, lens: list[tuple[int, int]]) -> torch.Tensor:
        """A random top-k [tokens, index_topk] as the fused kernel hands it over."""
        rows = []
        for prefix, new in lens:
            for last in range(prefix, prefix + new):
                order = torch.randperm(last + 1, generator=self.random, device=self.device)[:TOPK]
                rows.append(torch.nn.functional.pad(order, (0, TOPK - len(order)), value=-1))
        chosen, metadata = torch.stack(rows), self.backend.forward_metadata
        method = self.backend.get_topk_transform_method(batch.forward_mode)
        if method == self.module.TopkTransformMethod.RAGGED:
            found = chosen + metadata.topk_indices_offset[:, None]
        else:
            of = torch.tensor([i for i, (_, new) in enumerate(lens) for _ in range(new)])
            table = metadata.page_table_1[of.to(self.device)].long()
            found = table.gather(1, chosen.clamp_min(0))
        return torch.where(chosen < 0, chosen, found).int()

    def extend(self, lens: list[tuple[int, int]]) -> tuple[dict[str, Any], torch.Tensor]:
        """One prefill: what was decided, and the values [tokens, heads, V]."""
        batch = self.batch(lens, "EXTEND")
        new = batch.extend_num_tokens
        latent, rope = self.normal(new, RANK), self.normal(new, ROPE)
        q = self.normal(new, self.heads, NOPE + ROPE)
        self.backend.init_forward_metadata(batch)
        decided = {"mha": bool(self.backend.use_mha), "impl": self.backend.dsa_prefill_impl}
        # Drawn in any case, so that both processes go on with the same numbers.
        chosen = self.selected(batch, lens)
        if decided["mha"]:
            return decided, self._dense(batch, lens, q, latent, rope)
        forward = self.backend.forward_extend
        return decided, self._absorbed(forward, batch, q, latent, rope, chosen)

    def _absorbed(
        self, forward: Any, batch: Any, q: torch.Tensor, latent: torch.Tensor,
        rope: torch.Tensor, chosen: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        absorbed = torch.einsum("thd,hdc->thc", q[..., :NOPE], self.w_uk)
        out = forward(
            q=absorbed.flatten(1), k=latent[:, None], v=latent[:, None], layer=self.layer(True),
            forward_batch=batch, q_rope=q[..., NOPE:].flatten(1).contiguous(),
            k_rope=rope[:, None], topk_indices=chosen,
        )  # fmt: skip
        return torch.einsum("thc,hcv->thv", out.reshape(-1, self.heads, RANK), self.w_uv)

    def _dense(
        self, batch: Any, lens: list[tuple[int, int]], q: torch.Tensor, latent: torch.Tensor,
        rope: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """As the model does it: store, read the prefix back, expand."""
        self.pool.set_mla_kv_buffer(None, batch.out_cache_loc, latent, rope)
        if any(prefix for prefix, _ in lens):
            both = self.module.dequantize_k_cache_paged(
                self.pool.get_key_buffer(0), self.backend.forward_metadata.page_table_1_flattened
            )[:, 0]
            latent, rope = both[:, :RANK], both[:, RANK:]
        k_nope = torch.einsum("tc,hdc->thd", latent, self.w_uk)
        k = torch.cat((k_nope, rope[:, None].expand(-1, self.heads, -1)), dim=-1)
        v = torch.einsum("tc,hcv->thv", latent, self.w_uv)
        out: torch.Tensor = self.backend.forward_extend(
            q=q, k=k, v=v, layer=self.layer(False), forward_batch=batch, save_kv_cache=False
        )
        return out.view(-1, self.heads, V)

    def decode(self, contexts: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        """One decode step: the values [sequences, heads, V]."""
        lens = [(context - 1, 1) for context in contexts]
        batch = self.batch(lens, "DECODE")
        self.backend.init_forward_metadata(batch)
        latent, rope = self.normal(len(lens), RANK), self.normal(len(lens), ROPE)
        q, chosen = self.normal(len(lens), self.heads, NOPE + ROPE), self.selected(batch, lens)
        out = self._absorbed(self.backend.forward_decode, batch, q, latent, rope, chosen)
        return {"impl": self.backend.dsa_decode_impl}, out

    def verify(self, sequences: int) -> tuple[dict[str, Any], torch.Tensor]:
        """The indexer's logits of two draft tokens a sequence, in the rows that were chosen."""
        logits = import_module("sglang.jit_kernel.dsa.paged_mqa_logits")
        deep_gemm = import_module("deep_gemm")
        context = 1000
        batch = self.batch([(context, 2)] * sequences, "TARGET_VERIFY")
        self.backend.init_forward_metadata(batch)
        found = self.backend.forward_metadata
        lens = found.paged_mqa_ctx_lens_2d
        shape = (2 * sequences, 64, 128)
        q = (self.normal(*shape) / 8).to(torch.float8_e4m3fn)
        weights = self.normal(2 * sequences, 64).float()
        keys = (self.normal(self.pool.size // PAGE, PAGE * 128) / 8).to(torch.float8_e4m3fn)
        scales = torch.ones(len(keys), PAGE, device=self.device).view(torch.uint8)
        pool = torch.cat((keys.view(torch.uint8), scales), dim=1).view(-1, PAGE, 1, 132)
        common = (
            deep_gemm.fp8_paged_mqa_logits, q, pool, weights, lens, found.real_page_table,
            found.paged_mqa_schedule_metadata, found.real_page_table.shape[1] * PAGE,
        )  # fmt: skip
        if lens.shape == (sequences, 2):
            out = logits.deepgemm_paged_mqa_logits_native(
                *common, q_offset=2 * sequences, B=sequences, next_n=2
            )
        else:
            out = logits.deepgemm_paged_mqa_logits_split(*common, q_offset=2 * sequences)
        # What top-k reads: each row up to its own length.
        rows = torch.arange(2 * sequences, device=self.device)
        beyond = torch.arange(out.shape[1], device=self.device)[None] > context + rows[:, None] % 2
        return {"rows": list(lens.shape)}, out.masked_fill(beyond, 0)
