"""Beam search: one client request, and many sequences that fork and end during the search.

In each step of the search, every beam is a request of its own in the queue (a member), with the client's prompt and the
beam's tokens. A member runs for one token. The search uses the most likely candidates for that token, not the token
itself. When every member of the step has reported, the search (beams.py) decides which beams continue. These fork from
the members that they grew from. Until then those members are parked: they have left their slots and keep their blocks.

    member:  WAITING -> RUNNING -> (candidates) -> PARKED -> (its forks run, or its blocks are needed) -> ENDED
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, EarlyStopping, Hypothesis, Submission
from paceline.v1.worker_pb2 import TokenLogprobs
from scheduler_svc.core.admission.sampling_checks import LOGIT_PARAMS
from scheduler_svc.core.admission.validation import Limits
from scheduler_svc.core.arrays import packed, unpacked
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.rejection import invalid
from scheduler_svc.core.requests import beams
from scheduler_svc.core.requests.beams import BeamSearch
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import BeamGroup, Family, Request
from scheduler_svc.core.workers.state import WorkerState

EARLY_STOPPING: dict[int, beams.EarlyStopping] = {
    EarlyStopping.EARLY_STOPPING_UNSPECIFIED: False,
    EarlyStopping.EARLY_STOPPING_FIRST: True,
    EarlyStopping.EARLY_STOPPING_NEVER: "never",
}
UNSEARCHED = (*LOGIT_PARAMS, "grammar", "logprobs", "prompt_logprobs")  # parameters that beam search does not support


def make_search(options: BeamOptions, sampling: SamplingParams, eos_token_ids: Iterable[int] = ()) -> BeamSearch:
    """Raises Rejection."""
    if options.early_stopping not in EARLY_STOPPING:
        raise invalid("beam.early_stopping", f"{options.early_stopping} is unknown")
    try:
        return BeamSearch(
            width=options.width,
            num_return=options.num_return or 1,
            length_penalty=options.length_penalty if options.HasField("length_penalty") else 1.0,
            early_stopping=EARLY_STOPPING[options.early_stopping],
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens,
            eos_token_ids=() if sampling.ignore_eos else tuple(eos_token_ids),
            stop_token_ids=tuple(sampling.stop_token_ids),
        )
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        raise invalid(f"beam.{name}", message) from None


def check_beam(submission: Submission) -> None:
    """Raises Rejection."""
    sampling = submission.sampling
    make_search(submission.beam, sampling)
    for name in UNSEARCHED:
        if getattr(sampling, name):
            raise invalid(
                name, "is not supported by beam search, which uses the model's own probabilities; leave it out"
            )
    if submission.offline:
        raise invalid("offline", "a beam search cannot be offline; leave one of the two out")
    if submission.output_token_ids:
        raise invalid("output_token_ids", "a beam search delivers nothing before its end, so it cannot be continued")


class BeamGroups:
    """All running beam searches: starts them, forks their members, and ends them."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._unstarted: list[BeamGroup] = []  # accepted before the model was known

    def start(self, root: Request, options: BeamOptions, limits: Limits | None) -> None:
        """Start the search of an accepted root. If the model is not known yet, the root waits in the queue for it."""
        root.family.group = BeamGroup(root, options)
        self._unstarted.append(root.family.group)
        self.model_known(limits)

    def model_known(self, limits: Limits | None) -> None:
        if limits is None:
            return
        groups, self._unstarted = self._unstarted, []
        for group in groups:
            if group.root.phase is Phase.ENDED:
                continue
            if group.root in self._life.queue:  # the root never runs: its members run for it
                self._life.queue.of(group.root).remove(group.root)
                self._life.holdings.release(group.root)
            group.search = make_search(group.options, group.root.sampling, limits.model.eos_token_ids)
            self._run_beams(group, group.search, parents=[])

    def report(self, member: Request, logprobs: TokenLogprobs | None) -> None:
        """A member has run. It keeps its blocks, so that beams can fork from it."""
        group = member.family.group
        assert group is not None
        assert group.search is not None
        if group.root.history.cached_tokens is None:
            group.root.history.cached_tokens = member.history.cached_tokens
            group.root.history.num_cached_host_tokens = member.history.num_cached_host_tokens
        if logprobs is None:
            self._life.fail(member, "worker: sent no log probabilities for a beam")
            return
        tokens = unpacked(logprobs.top_token_ids)
        values = np.frombuffer(logprobs.top_logprobs, np.float32).tolist()
        group.reports[group.members.index(member)] = list(zip(tokens, values, strict=True))
        self._life.park(member)
        group.parked[member.arrival_index] = 0
        if len(group.reports) == len(group.members):
            group.search.advance([group.reports[i] for i in range(len(group.members))])
            group.reports.clear()
            if group.search.done:
                self._finish(group, group.search)
            else:
                self._run_beams(group, group.search, group.members)

    def release_parents(self, admitted: Iterable[Request]) -> None:
        """These requests have forked from their parents, or will run without a fork. A parked parent that no member
        needs any more is freed."""
        for member in admitted:
            parent, member.family.parent = member.family.parent, None
            if member.family.group is None or parent is None or parent.phase is not Phase.PARKED:
                continue
            member.family.group.parked[parent.arrival_index] -= 1
            if not member.family.group.parked[parent.arrival_index]:
                self._life.unpark(parent)

    def give_up_blocks(self, worker: WorkerState) -> bool:
        """Free the parked members of the worker. A beam that would have forked from a freed member computes a few
        tokens again. Returns whether the worker had a parked member."""
        parked = list(worker.parked.values())
        for member in parked:
            self._life.unpark(member)
        return bool(parked)

    def _run_beams(self, group: BeamGroup, search: BeamSearch, parents: list[Request]) -> None:
        group.parked = {parent.arrival_index: 0 for parent in parents if parent.phase is Phase.PARKED}
        root, members = group.root, []
        for beam in search.live:
            parent = parents[beam.parent] if parents else None
            member = replace(
                root,
                arrival_index=next(self._life.arrival_indexes),
                handle=0,
                prompt=root.prompt + packed(beam.tokens),
                output=bytearray(),
                sampling=SamplingParams(
                    max_tokens=1, top_p=1.0, ignore_eos=True, logprobs=True, num_top_logprobs=search.candidates_needed
                ),
                history=replace(root.history),
                extra_stop_ids=frozenset(),
                matches=None,
                family=Family(root.family.siblings, parent, root.family.samples, group),
            )
            if parent is not None and parent.phase is Phase.PARKED:
                group.parked[parent.arrival_index] += 1
            members.append(member)
        group.members = members
        for parent in parents:
            if not group.parked.get(parent.arrival_index):
                self._life.unpark(parent)
        for member in members:
            self._life.enqueue(member)

    def _finish(self, group: BeamGroup, search: BeamSearch) -> None:
        reasons = {"stop": FinishReason.FINISH_REASON_STOP, "length": FinishReason.FINISH_REASON_LENGTH}
        group.root.family.hypotheses = [
            Hypothesis(token_ids=packed(found.tokens), score=found.score, reason=reasons[found.reason])
            for found in search.best()
        ]
        first = (
            group.root.family.hypotheses[0].reason
            if group.root.family.hypotheses
            else FinishReason.FINISH_REASON_LENGTH
        )
        self._life.end(group.root, first)
