"""The decode graphs of an engine, of which the rows may be the new tokens of a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsa_tune.engines.sglang.pass_mode.forward import Forward
from nsa_tune.engines.sglang.pass_mode.rows.decode import as_decode
from nsa_tune.engines.sglang.pass_mode.rows.verify import as_verify, requests_of

_OF_SEQUENCES = ("multi_item_delimiter_indices", "token_indices_to_pool", "rids_int")
"""Fields, not of all releases, by which SGLang asks for more or which hold one value a sequence."""


@dataclass(frozen=True, slots=True)
class RowGraphs:
    """The graphs of one engine."""

    requests: tuple[int, ...]
    """Requests of each graph, ascending."""
    width: int = 1
    """Rows of a request."""
    verify: bool = False
    """Whether they verify draft tokens, as they do with speculative decoding."""
    hidden_states: bool = False
    """Whether they return the hidden states of all rows."""

    @classmethod
    def of(cls, runner: Any) -> RowGraphs:
        """Those of `runner`, SGLang's ModelRunner, which has captured some."""
        graphs = runner.decode_cuda_graph_runner
        requests = tuple(sorted(graphs.capture_bs))
        if runner.spec_algorithm.is_none():
            return cls(requests)
        full = graphs.capture_hidden_mode.is_full()
        return cls(requests, graphs.captured_req_width, verify=True, hidden_states=full)

    @property
    def sizes(self) -> list[int]:
        """Rows of each graph, ascending."""
        return [count * self.width for count in self.requests]

    def rows_of(self, forward_batch: Any) -> int | None:
        """Rows that an extend batch takes; None where it asks for more than rows have."""
        if not self._takes(forward_batch):
            return None
        return self.width * requests_of(forward_batch.extend_seq_lens_cpu, self.width)

    def run(self, call: Forward) -> Any:
        """The pass of an extend batch for which `rows_of` has an answer, by as many replays as it
        takes."""
        verify, most = self.verify, self.requests[-1]
        rows = as_verify(call.batch, self.width) if verify else as_decode(call.batch)
        full = _wants_hidden_states(call.batch)
        logits, states = [], []
        for start in range(0, rows.requests, most):
            part = rows.part(start, min(start + most, rows.requests))
            output = call.of(part.forward_batch).run()
            result = output.logits_output
            logits.append(part.of_ends(result.next_token_logits))
            if full:
                states.append(part.of_tokens(result.hidden_states))
        result.next_token_logits = _joined([part for part in logits if part is not None])
        result.hidden_states = _joined(states) if full else None
        return output

    def _takes(self, batch: Any) -> bool:
        """Whether each sequence has new tokens, and nothing is asked for that rows lack.

        They have the last tokens' logits, and where the graphs return them all hidden states.
        """
        hidden = batch.capture_hidden_mode
        return not (
            0 in batch.extend_seq_lens_cpu
            or batch.return_logprob
            or (_wants_hidden_states(batch) and not (self.hidden_states and hidden.is_full()))
            or batch.return_pooled_hidden_states
            or batch.input_embeds is not None
            or batch.replace_embeds is not None
            or (batch.mm_inputs and any(inputs is not None for inputs in batch.mm_inputs))
            or batch.spec_info is not None
            or batch.global_num_tokens_cpu is not None
            or any(getattr(batch, name, None) is not None for name in _OF_SEQUENCES)
        )


def _wants_hidden_states(batch: Any) -> bool:
    hidden = batch.capture_hidden_mode
    return hidden is not None and bool(hidden.need_capture())


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat(parts)
