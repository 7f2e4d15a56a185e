"""Keepers and cgroups for the tests of this folder."""

from tests.bed.cgroups import own_cgroup
from tests.bed.freezable import freezable
from tests.bed.keeper import any_keeper, folder_of_nobody, keeper, unprivileged_keeper, weak_keeper
from tests.bed.nodes import make_node

__all__ = [
    "any_keeper",
    "folder_of_nobody",
    "freezable",
    "keeper",
    "make_node",
    "own_cgroup",
    "unprivileged_keeper",
    "weak_keeper",
]
