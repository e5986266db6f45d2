"""Calibration: what `semkv-profile` measures and trains for one model. Nothing below the command line imports it."""

from .calibrate import Calibration, calibrate
from .data import CalibrationData, bundled_data, text_data
from .eagle import import_eagle
from .measure_settings import MeasureSettings
from .samples import MeasureData, bundled_measure_data, text_measure_data
from .settings import CalibrationSettings
from .steps import STEPS, Finished, Job, check_steps, run_steps

__all__ = [
    "STEPS",
    "Calibration",
    "CalibrationData",
    "CalibrationSettings",
    "Finished",
    "Job",
    "MeasureData",
    "MeasureSettings",
    "bundled_data",
    "bundled_measure_data",
    "calibrate",
    "check_steps",
    "import_eagle",
    "run_steps",
    "text_data",
    "text_measure_data",
]
