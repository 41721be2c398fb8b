"""`python -m tests.engine.fault_table`: prints docs/faults.md from the tests that inject faults.

The rows of the executor are the actions of `test_executor_faults`, which puts a fault into each
and compares what everybody else says with what it says alone. The rows of the edges name the test
that proves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.engine import test_executor_faults as executor
from tests.engine.test_executor_faults import Action

_HEAD = """\
# What breaks, and who notices

Written by `python -m tests.engine.fault_table`. Each row is a fault that a test injects.

## Inside a step

The fault is raised in the function, as a defect would, at each of its first calls in turn; *late*:
when the function is done. `tests/engine/test_executor_faults.py` compares the tokens of all other
requests with what they get alone, looks that no memory is left behind, and sends the next request.
Where MLX reports a failed allocation in the same place, nobody fails: what lost its KV is computed
again, once.

| where | who fails, with INTERNAL |
|---|---|
"""
_WHO = {
    executor.NOBODY: "nobody; what was to be stored is not",
    executor.ONE: "the request that it was done for",
    executor.BATCH: "the requests that it was done for together",
}


class Edge(NamedTuple):
    """A fault from outside, what comes of it, and the test: a file under tests/ and a function."""

    fault: str
    outcome: str
    test: str


_ACCEPTANCE = "acceptance/test_"
EDGES: dict[str, list[Edge]] = {
    "The model": [
        Edge(
            "logits that are NaN or infinite",
            "INTERNAL for that row; the others get the same tokens as alone",
            "engine/test_not_finite.py::test_it_ends_alone",
        ),
        Edge(
            "weights of NaN or infinity",
            "INVALID_ARGUMENT for LoadModel; the old model goes on",
            "engine/test_not_finite.py::test_a_model_without_a_finite_logit_is_not_loaded",
        ),
        Edge(
            "a pipe, a device or a terabyte as a file of a model; 100,000 layers; a chat template"
            " that loops or grows",
            "INVALID_ARGUMENT for LoadModel; the old model goes on",
            f"{_ACCEPTANCE}endless_loads.py::test_a_load_that_cannot_end_is_refused",
        ),
        Edge(
            "a chat template that loops for one conversation",
            "INVALID_ARGUMENT for it after 5 seconds of processor time",
            f"{_ACCEPTANCE}endless_loads.py::test_a_template_that_loops_for_one_request_fails_it_alone",
        ),
        Edge(
            "files that never answer, and a caller that leaves",
            "the load is left behind; the old model goes on",
            "engine/test_loading_beside.py::test_a_load_whose_files_never_answer_is_left_behind",
        ),
        Edge(
            "a load that fails at any stage",
            "its own status; running streams go on",
            "engine/test_loading_beside.py::test_a_load_that_fails_at_any_stage_leaves_streams_and_limits",
        ),
        Edge(
            "the hub fails, or nobody answers for it",
            "NOT_FOUND with what to do",
            "engine/test_loading_download.py::test_a_hub_that_nobody_answers_for",
        ),
    ],
    "The request": [
        Edge(
            "a grammar that overflows the stack, or takes all time or memory",
            "INVALID_ARGUMENT",
            f"{_ACCEPTANCE}costly_grammars.py::test_a_grammar_that_costs_too_much_is_refused_alone",
        ),
        Edge(
            "a video that takes all time or memory, or ends its decoder",
            "INVALID_ARGUMENT for its request; the process that decodes it ends",
            "engine/media/test_videos.py::test_a_clip_that_takes_too_much_ends_its_process_alone",
        ),
        Edge(
            "millions of empty entries, or fields of 40 MB",
            "INVALID_ARGUMENT before anything is parsed",
            "rpc/test_sizes.py::test_a_refusal_is_the_answer_of_the_call",
        ),
        Edge(
            "slow work on prompts",
            "short prompts pass it",
            "engine/test_preparing.py::test_a_short_prompt_passes_slow_ones",
        ),
        Edge(
            "a client that leaves, at any time",
            "its slot is free at once",
            f"{_ACCEPTANCE}leaving.py::test_a_client_that_leaves_in_prefill",
        ),
        Edge(
            "2,000 calls at once",
            "each OK or RESOURCE_EXHAUSTED",
            f"{_ACCEPTANCE}bursts.py::test_a_burst_ends_as_served_or_refused",
        ),
    ],
    "The disk": [
        Edge(
            "any flipped bit in a file of KV",
            "a miss",
            "engine/disk_cache/test_entry_file.py::test_any_flipped_bit_is_a_miss",
        ),
        Edge(
            "any other length of it",
            "a miss",
            "engine/disk_cache/test_entry_file.py::test_any_other_length_is_a_miss",
        ),
        Edge(
            "a full disk",
            "a miss, and one line in the log",
            "engine/disk_cache/test_writer.py::test_a_full_disk_is_a_miss_and_one_line",
        ),
        Edge(
            "a folder that vanishes",
            "a miss",
            "engine/disk_cache/test_writer.py::test_a_folder_that_vanishes_is_a_miss",
        ),
        Edge(
            "a process that is killed while it writes",
            "the old file stays",
            "engine/disk_cache/test_writer.py::test_a_process_that_dies_while_it_writes_leaves_the_old_file",
        ),
    ],
    "The process and the machine": [
        Edge(
            "a step that hangs",
            "UNAVAILABLE for all; the process says which step, and exits with 1",
            f"{_ACCEPTANCE}hanging.py::test_a_step_that_hangs_ends_the_calls_and_the_process",
        ),
        Edge(
            "a native call that hangs with the interpreter's lock",
            "a second process says so and ends the first",
            f"{_ACCEPTANCE}hanging.py::test_a_step_that_hangs_with_the_interpreters_lock_ends_the_process",
        ),
        Edge(
            "an engine that cannot go on",
            "UNAVAILABLE for all; the process exits with its cause as the last line",
            "rpc/test_process.py::test_an_engine_that_cannot_go_on_ends_the_process_with_its_cause",
        ),
        Edge(
            "nobody reads the log",
            "lines are dropped and counted; calls go on",
            f"{_ACCEPTANCE}unread_logs.py::test_a_full_log_stops_nothing_and_what_is_missing_is_counted",
        ),
        Edge(
            "closed standard streams",
            "nothing",
            f"{_ACCEPTANCE}unread_logs.py::test_closed_standard_streams_stop_nothing",
        ),
        Edge(
            "a memory limit of the control group",
            "RESOURCE_EXHAUSTED for what does not fit",
            f"{_ACCEPTANCE}machine_limits.py::test_a_full_control_group_is_an_answer_not_the_end",
        ),
        Edge(
            "a limit of the address space",
            "the same",
            f"{_ACCEPTANCE}machine_limits.py::test_few_addresses_are_an_answer_not_the_end",
        ),
        Edge(
            "few open files",
            "nothing, and the limit stays as it is",
            f"{_ACCEPTANCE}machine_limits.py::test_a_load_leaves_the_limit_of_open_files",
        ),
        Edge(
            "the gateway's process that starts backends is killed",
            "its backends end, and the next load starts another",
            "gateway/test_supervisor_warden.py::test_a_killed_warden_takes_the_backend_along_and_is_replaced",
        ),
        Edge(
            "the gateway is killed",
            "no backend is left",
            "gateway/test_supervisor_orphans.py::test_a_killed_gateway_leaves_no_backend_behind",
        ),
    ],
}


def render() -> str:
    """The whole document."""
    return _HEAD + "\n".join((*_inside(), *_edges())) + "\n"


def _inside() -> Iterator[str]:
    actions = [*executor.ACTIONS, *executor.WITH_FILES, *executor.IN_GUESSING]
    for action in actions:
        yield f"| {_place(action)} | {_WHO[action.most]} |"
    for name in executor.PASSES:
        yield f"| the model, {name} | {_WHO[executor.BATCH]} |"


def _place(action: Action) -> str:
    owner = getattr(action.owner, "__name__", "").rpartition(".")[2].removeprefix("Fake")
    caller = f" in `{action.caller}`" if action.caller else ""
    return f"`{owner}.{action.name}`{caller}{', late' * action.late}"


def _edges() -> Iterator[str]:
    for title, edges in EDGES.items():
        yield f"\n## {title}\n\n| fault | what comes of it | proven by |\n|---|---|---|"
        for edge in edges:
            yield f"| {edge.fault} | {edge.outcome} | `{edge.test.rpartition('::')[2]}` |"


if __name__ == "__main__":
    print(render(), end="")
