"""Whether a worker that answers gets on with its steps. No clock in here: time is what its heartbeats have taken."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1.worker_pb2 import Heartbeat

# Between two heartbeats (worker.proto), if the worker gets its share of the machine; more, if not.
HEARTBEAT_S = 0.25
# The worker watches its steps itself, from when each began; it is to speak first, for it knows more.
TIMES_ALLOWED = 2.0


@dataclass(slots=True)
class WorkerProgress:
    """Of the oldest step in flight: for how many heartbeats it has been that, against what they say of it.

    A worker says how long the step that it runs may take (by its size, and by what the last ones took), so a long
    prefill is not taken for a hang. Counted in heartbeats, neither the time in which the worker did not get to run is
    held against it, nor that in which we did not get to listen.
    """

    _step: int = 0
    _num_heartbeats: int = 0

    def told(self, heartbeat: Heartbeat, step: int, stall_s: float) -> str:
        """By a heartbeat while `step` is the oldest in flight (0: none is). Returns what is wrong, if anything is.

        `stall_s`: what a message between the two may take.
        """
        if step != self._step or not step:
            self._step, self._num_heartbeats = step, 0
            return ""
        self._num_heartbeats += 1
        age_s = self._num_heartbeats * HEARTBEAT_S
        if age_s <= stall_s:
            return ""
        if heartbeat.received < step:
            return f"the plan of step {step} has not arrived after {age_s:.1f} s"
        if not heartbeat.allowed_s:
            return f"step {step} has no result after {age_s:.1f} s, and is not run"
        if age_s <= stall_s + TIMES_ALLOWED * heartbeat.allowed_s:
            return ""
        return f"step {step} is not done after {age_s:.1f} s, of {heartbeat.allowed_s:.1f} s that it was allowed"
