"""Whether a worker that sends heartbeats makes progress with its steps. It reads no clock: heartbeats measure time."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1.worker_pb2 import Heartbeat

# Seconds between two heartbeats (worker.proto) if the worker gets its share of the machine; more if it does not.
HEARTBEAT_S = 0.25
# The worker watches its steps, too. This factor leaves it time to report first, because it knows more.
TIMES_ALLOWED = 2.0


@dataclass(slots=True)
class WorkerProgress:
    """Counts the heartbeats since a step became the oldest in flight, and compares them with the step's allowed time.

    The worker says how long its running step may take (by the step's size, and by the last steps), so a long prefill is
    no stall. Time is counted in heartbeats, so a time in which this process or the worker's process is stopped does not
    count.
    """

    _step: int = 0
    _num_heartbeats: int = 0

    def find_stall(self, heartbeat: Heartbeat, step: int, stall_s: float) -> str:
        """A heartbeat has come while `step` is the oldest in flight (0: none is). Returns what is wrong, or "".

        `stall_s`: how long a message between scheduler and worker may take.
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
            return f"step {step} has no result after {age_s:.1f} s, and the worker does not run it"
        if age_s <= stall_s + TIMES_ALLOWED * heartbeat.allowed_s:
            return ""
        return f"step {step} is not done after {age_s:.1f} s; it was allowed {heartbeat.allowed_s:.1f} s"
