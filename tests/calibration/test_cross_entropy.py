"""Summed cross entropy against PyTorch's, and the lock that keeps one sample's logits in memory."""

import threading

import pytest
import torch
import torch.nn.functional as F

from kvq_cli.calibration import capture
from kvq_cli.calibration.cross_entropy import summed_cross_entropy


@pytest.mark.parametrize(("tokens", "dtype", "tolerance"), [(2, torch.float64, 1e-5), (300, torch.float16, 1e-3)])
def test_loss_and_gradient_equal_pytorchs(tokens, dtype, tolerance):
    noise = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(tokens, 97, generator=noise)).to(dtype).requires_grad_()
    targets = torch.randint(97, (tokens - 1,), generator=noise)
    plain = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(plain[:-1], targets, reduction="sum")
    loss = summed_cross_entropy(logits, targets)
    (2 * loss).backward()
    (2 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.float(), plain.grad, rtol=tolerance, atol=tolerance * 1e-2)
    assert (logits.grad[-1] == 0).all()


def test_the_lock_is_held_from_the_output_embeddings_until_their_gradient():
    head, x = torch.nn.Linear(3, 5), torch.ones(2, 3, requires_grad=True)
    with capture._one_sample_of_logits(head):
        total = head(x * 1).sum() + head(x * 2).sum()  # a model may call them twice
        assert capture._LOGITS.locked()
        other = threading.Thread(target=lambda: head(x))  # another thread's call does not wait for this hook
        other.start()
        other.join(5)
        assert not other.is_alive()
        total.backward()
        assert not capture._LOGITS.locked()
    with pytest.raises(RuntimeError, match="stopped"), capture._one_sample_of_logits(head):
        head(x * 1)
        raise RuntimeError("stopped")
    assert not capture._LOGITS.locked()
