"""The prefixes that save most, as a tree."""

from __future__ import annotations

from kvcm.optimizer.locality import PrefixNode, PrefixTree
from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.markup import Markup, joined, tag
from kvcm.optimizer.report.section import Section
from kvcm.optimizer.study import Study

__all__ = ["prefixes"]


def prefixes(study: Study, key: str) -> Section:
    """Return the section on prefixes."""
    tree = study.prefixes
    return Section(
        key,
        "Most valuable prefixes",
        f"Runs of blocks that are reused together, by the tokens that an unlimited cache would not compute again: "
        f"{amounts.short(tree.saved_tokens)} in all. Shown are {len(tree.nodes)} of {amounts.count(tree.node_count)} "
        "runs, each below what it continues; bars are shares of the greatest. These are candidates for pinning.",
        (_tree(study, tree),) if tree.nodes else (tag("p", "No block is ever read again."),),
    )


def _tree(study: Study, tree: PrefixTree) -> Markup:
    children: dict[int, list[int]] = {}
    for number, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(number)
    greatest = max(node.saved_tokens for node in tree.nodes)
    has_instances = len(study.trace.instance_names) > 1
    # Chains of runs can be long: those below are written first, so that no recursion is needed.
    written: dict[int, Markup] = {}
    for number in range(len(tree.nodes) - 1, -1, -1):
        node = tree.nodes[number]
        text = _told(node, tree.saved_tokens, has_instances=has_instances)
        bar = tag("span", class_="bar", style=f"width:{100 * node.saved_tokens / max(1, greatest):.1f}%")
        below = [written.pop(each) for each in children.get(number, [])]
        written[number] = tag("li", text, bar, *([tag("ul", *below)] if below else []))
    return tag("ul", *(written[each] for each in children[-1]), class_="tree")


def _told(node: PrefixNode, saved_tokens: int, *, has_instances: bool) -> Markup:
    where = f"{node.instance}: " if has_instances else ""
    first, last = node.depth + 1, node.depth + node.blocks
    place = f"blocks {first:,}–{last:,}" if node.blocks > 1 else f"block {first:,}"
    by = f" by {node.sessions:,} sessions" if node.sessions > 1 else " by one session" if node.sessions else ""
    share = amounts.percent(node.saved_tokens / max(1, saved_tokens))
    span = f"{amounts.duration(node.first_seconds)} to {amounts.duration(node.last_seconds)}"
    return joined(
        tag("strong", f"{amounts.short(node.saved_tokens)} tokens"),
        f" ({share}): {where}{place}, reused {node.reuses:,} times{by}",
        tag("span", f", from {span}", class_="muted"),
    )
