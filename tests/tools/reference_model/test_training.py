"""Training: resumption, the loss, the optimizer and the exported folder."""

import pytest
import torch
from reference_model import export, train
from reference_model.loss import ChunkedCrossEntropy
from reference_model.muon import orthogonal
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq_cli.reference.prompts import STOP_TOKEN


@pytest.fixture
def make_trainer(make_curriculum):
    def make():
        settings = train.config(200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
        return train.Trainer(make_curriculum(), settings, "cpu", micro_batch=128, compiled=False)

    return make


def test_resumed_training_equals_uninterrupted(make_trainer, tmp_path):
    uninterrupted, first, second = make_trainer(), make_trainer(), make_trainer()
    for _ in range(8):
        uninterrupted.advance()
    for _ in range(5):
        first.advance()
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    for _ in range(3):
        second.advance()
    assert second.step == uninterrupted.step == 8
    resumed = dict(second.model.named_parameters())
    for name, weight in uninterrupted.model.named_parameters():
        assert torch.equal(weight, resumed[name]), name


def test_chunked_cross_entropy_equals_the_library():
    torch.manual_seed(0)
    hidden, head = torch.randn(70, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets, weights = torch.randint(0, 50, (70,)), torch.rand(70)
    expected = (torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none") * weights).sum()
    expected_gradients = torch.autograd.grad(expected * 3, (hidden, head))
    loss = ChunkedCrossEntropy.apply(hidden, head, targets, weights, 32)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss * 3, (hidden, head)), expected_gradients)


def test_muon_makes_updates_orthogonal():
    torch.manual_seed(0)
    for rows, columns in ((40, 24), (24, 40)):
        singular = torch.linalg.svdvals(orthogonal(torch.randn(3, rows, columns)))
        assert singular.min() > 0.5 and singular.max() < 1.5


def test_the_exported_folder_is_the_model_and_its_tokenizer(make_trainer, tokenizer, tmp_path):
    trainer = make_trainer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    scores = {
        "step": 3,
        "tokens": 700,
        "perplexity": 9.5,
        "tasks": {"chains@64": [0.5, 0.75], "single@128": [1.0, 1.0]},
    }
    recipe = {"command": "python -m reference_model.train", **train.describe(trainer.curriculum)}
    folder = tmp_path / "export"
    export.export(trainer.model, tmp_path / "tokenizer.json", folder, scores, recipe)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], weight.bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder).eos_token == STOP_TOKEN
    card = (folder / "README.md").read_text()
    assert "| task | 64 tokens | 128 tokens |\n|---|---|---|\n| chains | 0.5 | - |\n| single | - | 1.0 |" in card
