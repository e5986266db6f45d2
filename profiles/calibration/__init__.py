"""Calibration: what `semkv-profile` measures and trains for one model. Nothing below the command line imports it."""

from .calibrate import Calibration, calibrate
from .data import CalibrationData, bundled_data, text_data
from .settings import CalibrationSettings

__all__ = ["Calibration", "CalibrationData", "CalibrationSettings", "bundled_data", "calibrate", "text_data"]
