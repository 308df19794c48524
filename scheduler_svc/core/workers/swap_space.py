"""A worker's host memory: the requests that are swapped out to it, and the copies that its next plan carries."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.v1.worker_pb2 import StepPlan
from scheduler_svc.core.arrays import packed, unpacked
from scheduler_svc.core.requests.request import Request


@dataclass(slots=True, eq=False)
class SwapSpace:
    """The scheduler's view of a worker's host memory."""

    free_blocks: int = 0  # host blocks that are free or hold only cached KV
    swapped: dict[int, Request] = field(default_factory=dict)  # waiting requests with their KV here, by sequence
    # Copies for the next plan: device blocks, host blocks; by sequence.
    swap_outs: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    # Copies of evicted blocks for the next plan: the device block, by the host block that it is copied to.
    demotions: dict[int, int] = field(default_factory=dict)

    def add_demotions(self, device_blocks: bytes, host_blocks: bytes) -> None:
        """Copies for the next plan. The last copy to a host block counts."""
        self.demotions.update(zip(unpacked(host_blocks), unpacked(device_blocks), strict=True))

    def add_swap_out(self, sequence: int, device_blocks: bytes, host_blocks: bytes) -> None:
        """Copies for the next plan, in place of demotions to the same host blocks."""
        self.swap_outs[sequence] = (device_blocks, host_blocks)
        for block in unpacked(host_blocks) if self.demotions else ():
            self.demotions.pop(block, None)

    def forget(self, sequence: int) -> None:
        """The sequence has ended or lost its blocks: a copy that no plan has carried yet is dropped."""
        self.swapped.pop(sequence, None)
        self.swap_outs.pop(sequence, None)

    def forget_cache(self) -> None:
        """The cache is gone, and with it all host blocks that no sequence uses. Copies for sequences are still made."""
        self.free_blocks = 0
        self.demotions.clear()

    def add_copies(self, plan: StepPlan) -> None:
        """The plan will be sent: add the gathered copies to it. The worker makes them before anything else."""
        for device_blocks, host_blocks in self.swap_outs.values():
            plan.swap_out_from += device_blocks
            plan.swap_out_to += host_blocks
        self.swap_outs.clear()
        if self.demotions:
            plan.swap_out_from += packed(self.demotions.values())
            plan.swap_out_to += packed(self.demotions)
            self.demotions.clear()
