"""The sequences of one loaded model, by number, state and rectangle."""

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

    @property
    def waiting(self) -> bool:
        """Whether a sequence is waiting to be admitted."""
        return len(self.by_number) > len(self.admitted)

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
        """Return a sequence to waiting; it loses its KV in this step."""
        self.admitted.pop(sequence.number, None)
        sequence.wait_again(step)

    def remove(self, number: int) -> SequenceState | None:
        """Remove a sequence; returns its data.

        The other sequences may still have its number in `shared`. They are not searched, because
        thousands of sequences may be cancelled in one step; no number is used again.
        """
        self.admitted.pop(number, None)
        return self.by_number.pop(number, None)
