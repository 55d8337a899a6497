"""Messages via host memory; needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from yuan_train.parallel.transport import _host_copy


@pytest.mark.gpu
def test_a_message_leaves_a_card_through_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sent = torch.randn(3, 5, 7, dtype=torch.bfloat16, device="cuda")
    copied = _host_copy(sent)
    assert copied.device.type == "cpu" and copied.is_pinned()
    assert torch.equal(copied.to("cuda", copy=True), sent)
