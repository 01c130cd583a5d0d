"""Text for calibration and for held-out evaluation: where it comes from, and token windows cut from it.

Knows files, the hub cache and the built-in texts; knows no layer and no torch. Calibration and held-out texts
of the built-in set share no document.
"""

from lmdeploy.lite.data.builtin import DOMAINS, held_out
from lmdeploy.lite.data.calibration import CalibrationSet, calibration_windows, check_size

__all__ = ["DOMAINS", "CalibrationSet", "calibration_windows", "check_size", "held_out"]
