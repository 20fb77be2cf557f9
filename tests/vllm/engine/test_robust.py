"""Aborted, refused and random requests: no block is lost, and the engine goes on answering."""

import random

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def tokens(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize(("method", "requests"), [("fp16", 30), ("kivi:sinks=32:recent=96", 200), ("temporalkv", 30)])
def test_random_arrivals_and_aborts_leave_no_block_behind(method, requests, case, start, prompts):
    draw = random.Random(0)
    with start(method, max_num_batched_tokens=64, num_gpu_blocks_override=180) as engine:
        core = engine.llm.llm_engine
        waiting = {
            f"r{i}": (prompts[draw.randrange(4, 8)][: draw.randrange(1, 200)], draw.randrange(1, 40))
            for i in range(requests)
        }
        sent: dict[str, tuple[list[int], int]] = {}
        running: list[str] = []
        answers: dict[str, list[int]] = {}
        while waiting or core.has_unfinished_requests():
            for _ in range(min(draw.randrange(3), len(waiting))):
                name, (prompt, count) = waiting.popitem()
                sent[name] = prompt, count
                running.append(name)
                core.add_request(name, {"prompt_token_ids": prompt}, tokens(count))
            if running and draw.random() < 0.2:
                core.abort_request([running.pop(draw.randrange(len(running)))])
            for output in core.step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        assert engine.free_blocks == engine.all_blocks
        assert requests // 4 < len(answers) < requests
    with start(method, enable_prefix_caching=False) as engine:
        again = engine.tokens([sent[name][0] for name in answers], tuple(sent[name][1] for name in answers))
        assert [list(output.outputs[0].token_ids) for output in again] == list(answers.values())
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
