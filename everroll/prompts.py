"""The data set of prompts: loading, fingerprint, and the deterministic order in which groups draw from it.

Group n plays position n mod N of epoch n div N. The order within an epoch is a keyed permutation that is computed,
not stored, so that any worker finds the prompt of any group without state. A curriculum (`everroll.data.curriculum`)
chooses otherwise; then the run holds the indices that it chose.
"""

from everroll.data.dataset import Dataset, DatasetCache, load_dataset
from everroll.data.order import compute_prompt_index
from everroll.data.records import Prompt

__all__ = ["Dataset", "DatasetCache", "Prompt", "compute_prompt_index", "load_dataset"]
