"""Documents: what is stored of a file or a batch, and the interface of their stores.

A document is a short JSON text. Its content lies beside it in numbered pieces, and a piece never changes: if two
gateways add the same piece, the first one counts. A document with work (a batch) has a lease, as a response in progress
has:

    put ──▶ waiting ── claim ──▶ worked on ── replace, ends_work ──▶ without work
               ▲                     │
               └──── lease over ─────┘   the gateway is gone, or has given the lease back

A document belongs to its owner, the API key that made it ("" without keys). Only `waiting` and `purge` reach the
documents of all owners: the gateways call them for their own work. Every other operation names the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

DocumentKind = Literal["file", "batch"]


class DocumentName(NamedTuple):
    """The key of a document: an owner has at most one document of a kind with an id."""

    kind: DocumentKind
    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class Document:
    """A stored file or batch, without a file's content. `label`: a file's purpose, or the model of a batch.
    `num_bytes`: the size that counts for the owner. `data`: JSON. `version`: how often the document was replaced."""

    name: DocumentName
    label: str
    created_s: float
    expires_s: float
    num_bytes: int
    data: bytes
    version: int = 0


class ContentPiece(NamedTuple):
    """A piece of the content of a document. `mark`: a small number that marks() gives without the data."""

    number: int
    mark: int
    data: bytes


class StoreUsage(NamedTuple):
    """The number and the size of all documents of one kind and one owner."""

    num_documents: int
    num_bytes: int


class DocumentStore(Protocol):
    """Keeps documents for all gateways that share it. Every method raises ApiError 503 if the store fails."""

    async def put(self, document: Document, *, has_work: bool = False) -> bool:
        """Add a document. False if the owner has one of this name already. `has_work`: it waits for a gateway."""
        ...

    async def get(self, name: DocumentName) -> Document | None:
        """The document; None if there is none, or if it has expired."""
        ...

    async def page(
        self,
        kind: DocumentKind,
        owner: str,
        labels: Sequence[str],
        *,
        after: Document | None = None,
        most: int,
        newest_first: bool = True,
    ) -> list[Document]:
        """The owner's documents behind `after`, by time. `after` may have been deleted. No labels: with any label."""
        ...

    async def usage(self, kind: DocumentKind, owner: str) -> StoreUsage:
        """What the owner has stored."""
        ...

    async def replace(self, document: Document, *, ends_work: bool = False) -> bool:
        """Store label, expiry, size and data. False if the stored version is not the document's version, or if there is
        no document of this name."""
        ...

    async def delete(self, name: DocumentName) -> bool:
        """Delete a document and its pieces. False if there is none."""
        ...

    async def add_pieces(self, name: DocumentName, pieces: Sequence[ContentPiece]) -> int:
        """Add the pieces with new numbers, and say how many that were. 0 if there is no document of this name."""
        ...

    async def marks(self, name: DocumentName) -> Mapping[int, int]:
        """The marks of all pieces, by number."""
        ...

    async def pieces(self, name: DocumentName, numbers: Sequence[int]) -> list[bytes]:
        """The data of these pieces. Fewer, if pieces are missing."""
        ...

    async def drop_pieces(self, name: DocumentName) -> None:
        """Delete all pieces, and keep the document."""
        ...

    async def waiting(self, kind: DocumentKind, label: str, most: int) -> list[DocumentName]:
        """Documents with work and without a lease: for each owner the one that has waited longest. The
        longest wait comes first."""
        ...

    async def unfinished(self, kind: DocumentKind, owner: str) -> list[str]:
        """The ids of the owner's documents with work, waiting or not."""
        ...

    async def claim(self, name: DocumentName, lease_s: float) -> bool:
        """Take the lease. False if a gateway (this one, too) has the lease, or if there is no work."""
        ...

    async def renew(self, names: Sequence[DocumentName], lease_s: float) -> list[DocumentName]:
        """Prolong leases (0 gives them back). Returns the names of documents that have no work any more, or a lease of
        another gateway."""
        ...

    async def purge(self) -> None:
        """Delete what has expired. Call this about once a minute."""
        ...
