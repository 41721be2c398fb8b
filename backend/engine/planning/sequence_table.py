"""Finds the sequences of one loaded model by their number, state, group or batch."""

from __future__ import annotations

from backend.engine.planning.sequence_state import SequenceState


class SequenceTable:
    """The sequences of one loaded model.

    by_number: all sequences, in order of arrival.
    admitted: the sequences in prefill or decode, in order of admission.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, SequenceState] = {}
        self.admitted: dict[int, SequenceState] = {}

    def of(self, state: str) -> list[SequenceState]:
        """Return the sequences in a state: `waiting` ones by arrival, the others by admission."""
        among = self.by_number if state == "waiting" else self.admitted
        return [sequence for sequence in among.values() if sequence.state == state]

    def groups(self) -> list[list[SequenceState]]:
        """Return the sequences in prefill, grouped by shared passes."""
        groups: dict[int, list[SequenceState]] = {}
        for sequence in self.of("prefill"):
            groups.setdefault(sequence.group or -sequence.number, []).append(sequence)
        return list(groups.values())

    def batches(self) -> dict[int, list[SequenceState]]:
        """Return the decoding sequences, by the number of their batch."""
        batches: dict[int, list[SequenceState]] = {}
        for sequence in self.of("decode"):
            batches.setdefault(sequence.batch, []).append(sequence)
        return batches

    def preempt(self, sequence: SequenceState, step: int) -> None:
        """Set a sequence back to waiting; the executor drops its KV in this step."""
        self.admitted.pop(sequence.number, None)
        sequence.wait_again(step)

    def remove(self, number: int) -> SequenceState | None:
        """Remove a sequence, except its number in `SequenceState.shared` of other sequences.

        Thousands of sequences may be cancelled in one step, and no number is used again. Returns
        the removed sequence; None if there is none.
        """
        self.admitted.pop(number, None)
        return self.by_number.pop(number, None)
