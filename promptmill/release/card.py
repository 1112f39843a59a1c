"""The dataset card: README.md with the `configs` that `load_dataset` follows, and the accounting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from promptmill.prompts.policies import NOTES
from promptmill.types import STATUSES, Tally

_TEMPLATE = """---
configs:
{configs}
---
# {title}

Answers of `{model}` (revision `{model_revision}`), made by promptmill {version}.

```python
from datasets import load_dataset

rows = load_dataset("<this folder>", "{first_view}", split="train")
```

- `conversations`: one row a conversation, messages with `reasoning_content`; whole, unflagged answers only.
- `turns`: one row a generated turn, `input_ids` and `loss_mask` (1 exactly on generated ids); truncated and
  flagged answers are kept and marked in `finish_reason` and `flags`.

## Accounting

{accounting}

## Rows

{rows}

## Rejected

{rejected}

## Policies

Prompts that were changed, or kept although they were odd.

{noted}
"""


def write_card(
    views: Mapping[str, int],
    tallies: Sequence[Tally],
    model: str,
    model_revision: str,
    version: str,
) -> str:
    """`views` maps each view to its number of rows; the first one is the default configuration."""
    configs = []
    for i, view in enumerate(views):
        default = "\n    default: true" if i == 0 else ""
        configs.append(
            f"  - config_name: {view}{default}\n    data_files:\n"
            f"      - split: train\n        path: data/{view}/*.parquet"
        )
    return _TEMPLATE.format(
        configs="\n".join(configs),
        title="Regenerated answers",
        model=model,
        model_revision=model_revision,
        version=version,
        first_view=next(iter(views)),
        accounting=accounting_table(tallies),
        rows="\n".join(f"- `{view}`: {n:,}" for view, n in views.items()),
        rejected=reject_list(tallies),
        noted=note_list(tallies),
    )


def accounting_table(tallies: Sequence[Tally]) -> str:
    """Markdown; every row of the input stands in exactly one column."""
    head = "| partition | rows | " + " | ".join(STATUSES) + " |"
    rule = "|---|" + "---:|" * (len(STATUSES) + 1)
    lines = [
        f"| {t.partition} | {t.rows:,} | " + " | ".join(f"{t.counts[s]:,}" for s in STATUSES) + " |"
        for t in tallies
    ]
    return "\n".join([head, rule, *lines])


def reject_list(tallies: Sequence[Tally]) -> str:
    lines = [
        f"- {tally.partition}: {n:,} {reason}" for tally in tallies for reason, n in tally.rejected.items()
    ]
    return "\n".join(lines) or "None."


def note_list(tallies: Sequence[Tally]) -> str:
    lines = [f"- {t.partition}: {n:,} {note}: {NOTES[note]}" for t in tallies for note, n in t.notes.items()]
    return "\n".join(lines) or "None."
