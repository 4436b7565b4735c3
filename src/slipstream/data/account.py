"""What became of every row and token: the account that tokenising hands over with its documents.

Packing tools have lost most of a user's tokens without a word; here each that is not learned from is booked under the
reason, and the sums close:

    rows_read    = rows_kept + rows_dropped + rows_bad
    tokens made  = tokens + tokens_dropped + tokens_cut
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

_FIRST = 20


@dataclass(frozen=True, kw_only=True)
class Account:
    """Counts of rows and tokens; what was left out, and why."""

    rows_read: int = 0
    rows_kept: int = 0
    """Rows of which at least a part is trained on."""
    rows_dropped: int = 0
    """Rows left out because they are longer than ``max_length`` (``overlong: drop``)."""
    rows_cut: int = 0
    """Rows kept up to ``max_length`` (``overlong: truncate``)."""
    rows_split: int = 0
    """Rows made into several documents (``overlong: split``)."""
    rows_bad: int = 0
    """Rows left out because they are empty, have nothing to learn, or fail to encode (``bad_rows: skip``)."""
    documents: int = 0
    tokens: int = 0
    """Tokens of all documents."""
    tokens_learned: int = 0
    """Those of them whose prediction is trained."""
    tokens_dropped: int = 0
    """Tokens of dropped and bad rows, and of pieces of split rows with nothing to learn."""
    tokens_cut: int = 0
    """Tokens beyond ``max_length`` of rows that were cut."""
    bad: tuple[tuple[int, str], ...] = ()
    """Row number and reason of the first 20 bad rows."""

    def lines(self) -> list[str]:
        """The account in sentences; what was left out comes with how much."""
        share = f" ({self.tokens_learned / self.tokens:.0%})" if self.tokens else ""
        told = [
            f"{self.rows_kept:,} of {counted(self.rows_read, 'row')} kept: {counted(self.documents, 'document')}, "
            f"{counted(self.tokens, 'token')}, {self.tokens_learned:,} learned{share}."
        ]
        if self.rows_cut:
            told.append(
                f"{counted(self.rows_cut, 'row')} cut to the maximum length: {counted(self.tokens_cut, 'token')} lost."
            )
        if self.rows_split:
            told.append(f"{counted(self.rows_split, 'row')} split into documents of the maximum length.")
        if self.rows_dropped:
            told.append(f"{counted(self.rows_dropped, 'row')} dropped: longer than the maximum length.")
        if self.tokens_dropped:
            told.append(f"{counted(self.tokens_dropped, 'token')} dropped with rows or pieces that are not trained on.")
        if self.rows_bad:
            first = "; ".join(f"row {number}: {reason}" for number, reason in self.bad[:3])
            told.append(f"{counted(self.rows_bad, 'bad row')} skipped, e.g. {first}.")
        return told

    def as_json(self) -> dict[str, Any]:
        """The account for a JSON file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Account":
        """The account that `as_json` wrote. Raises ``TypeError`` or ``ValueError`` where it isn't one."""
        bad = tuple((int(number), str(reason)) for number, reason in values["bad"])
        return cls(**{**values, "bad": bad})


def counted(number: int, what: str) -> str:
    """``1 row``, ``1,000 rows``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class Books:
    """The account while it is being kept."""

    def __init__(self) -> None:
        self._counts = {field.name: 0 for field in fields(Account) if field.name != "bad"}
        self._bad: list[tuple[int, str]] = []

    def add(self, **counts: int) -> None:
        """Adds to the named counts."""
        for name, count in counts.items():
            self._counts[name] += count

    def add_bad(self, number: int, reason: str, tokens: int = 0) -> None:
        """Books a bad row."""
        self.add(rows_bad=1, tokens_dropped=tokens)
        if len(self._bad) < _FIRST:
            self._bad.append((number, reason))

    def add_books(self, other: "Books") -> None:
        """Adds what was booked of later rows."""
        self.add(**other._counts)
        self._bad = [*self._bad, *other._bad][:_FIRST]

    def closed(self) -> Account:
        """The account as it stands; its sums close."""
        account = Account(**self._counts, bad=tuple(self._bad))
        assert account.rows_read == account.rows_kept + account.rows_dropped + account.rows_bad, "no row is lost"
        return account
