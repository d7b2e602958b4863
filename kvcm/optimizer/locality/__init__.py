"""How often, how soon and by whom blocks are used again."""

from kvcm.optimizer.locality.distribution import Distribution, distribution
from kvcm.optimizer.locality.overview import Locality, locality_of
from kvcm.optimizer.locality.popularity import Popularity
from kvcm.optimizer.locality.prefixes import PrefixNode, PrefixTree, valuable_prefixes
from kvcm.optimizer.locality.sessions import SessionReuse
from kvcm.optimizer.locality.working_set import WorkingSet

__all__ = [
    "Distribution",
    "Locality",
    "Popularity",
    "PrefixNode",
    "PrefixTree",
    "SessionReuse",
    "WorkingSet",
    "distribution",
    "locality_of",
    "valuable_prefixes",
]
