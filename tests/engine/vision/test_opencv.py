"""No served family needs OpenCV or SciPy, which are not installed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from backend.engine.vision.patches import opencv_replaced

_IMPORTING = """
import sys
from backend.engine.vision.saved_names import in_earlier_form
from backend.engine.vision.families import _modules, why_not_seen

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("cv2", "scipy"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
served = [name for name in _modules() if not why_not_seen({"model_type": name})]
assert len(served) > 50
for name in served:
    in_earlier_form({"model_type": name})
assert not {"cv2", "scipy"} & set(sys.modules)
"""


def test_the_module_of_every_family_can_be_imported_without_them() -> None:
    command = [sys.executable, "-c", _IMPORTING]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_image_is_scaled() -> None:
    from mlx_vlm.utils import get_model_and_args

    with opencv_replaced():
        module, _ = get_model_and_args({"model_type": "multi_modality"})
    resize = sys.modules[f"{module.__name__}.vision"].resize_image
    ramp = np.linspace(-1, 1, 64, dtype=np.float32)
    image = np.stack([np.tile(ramp, (48, 1)), np.tile(-ramp, (48, 1)), np.ones((48, 64))], -1)
    seen = np.array(resize(image.astype(np.float32), (32, 24)))
    assert seen.shape == (24, 32, 3)
    even = (ramp[::2] + ramp[1::2]) / 2
    assert seen[12, 2:-2, 0] == pytest.approx(even[2:-2], abs=0.01)
    assert seen[12, 2:-2, 1] == pytest.approx(-even[2:-2], abs=0.01)
    assert seen[..., 2] == pytest.approx(1, abs=1e-5)
