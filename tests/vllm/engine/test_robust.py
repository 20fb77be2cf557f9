"""Aborted, refused and random requests: no block is lost, and the engine goes on answering."""

import random

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def tokens(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


METHODS = ("fp16", "kivi:sinks=32:recent=96", "temporalkv")


@pytest.mark.parametrize("method", METHODS)
def test_random_arrivals_and_aborts_leave_no_block_behind(method, case, start, prompts):
    draw = random.Random(0)
    with start(method, max_num_batched_tokens=64, num_gpu_blocks_override=180) as engine:
        core = engine.llm.llm_engine
        waiting = [f"r{i}" for i in range(30)]
        running: list[str] = []
        while waiting or core.has_unfinished_requests():
            for _ in range(draw.randrange(3)):
                if waiting:
                    running.append(waiting.pop())
                    source, length = prompts[draw.randrange(4, 8)], draw.randrange(1, 200)
                    core.add_request(running[-1], {"prompt_token_ids": source[:length]}, tokens(draw.randrange(1, 40)))
            if running and draw.random() < 0.2:
                core.abort_request([running.pop(draw.randrange(len(running)))])
            core.step()
        assert engine.free_blocks == engine.all_blocks
        answer = engine.tokens(prompts[:1], (40,))[0]
        assert list(answer.outputs[0].token_ids) == case(method).expected[0]


def test_refused_requests_leave_the_engine_answering(case, start, prompts):
    with start("kivi:sinks=32:recent=96") as engine:
        for bad, new in (([1] * 2000, 5), ([], 5), ([10**6], 5), ([1, 2], 0)):
            with pytest.raises((ValueError, VLLMValidationError)):
                engine.tokens([bad], (new,))
        answer = engine.tokens(prompts[:1], (40,))[0]
        assert list(answer.outputs[0].token_ids) == case("kivi:sinks=32:recent=96").expected[0]
        assert engine.free_blocks == engine.all_blocks
