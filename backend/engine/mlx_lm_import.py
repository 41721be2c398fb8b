"""Imports mlx-lm without its side effect on the process, and without reading transformers twice.

mlx-lm 0.32.2 sets the limit of open files when it is imported: it lowers a larger limit, and if the
hard limit is smaller, it raises an exception, which would make every load fail.

transformers 5.23.0 lists the names in its 1,600 model files by reading them, once for
`transformers` and once for `transformers.models`, which takes as long as the rest of the import.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def import_mlx_lm() -> None:
    """Import mlx-lm without changing the limits of the process."""
    if "mlx_lm.utils" in sys.modules:
        return
    _import_transformers()
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit


def _import_transformers() -> None:
    """Import `transformers.models` with the names that were read for `transformers`."""
    import transformers
    from transformers.utils import import_utils

    if "transformers.models" in sys.modules:
        return
    models = Path(transformers.__file__).parent / "models"
    # The last folder that was read is in the function's cache.
    names = import_utils.spread_import_structure(
        import_utils.create_import_structure_from_path(models)
    )
    read = import_utils.define_import_structure
    import_utils.define_import_structure = lambda _: names
    try:
        import transformers.models
    finally:
        import_utils.define_import_structure = read
