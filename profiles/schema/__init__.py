"""What a profile holds, how it is stored and checked. Imports neither CUDA nor Triton code."""

from .profile import Profile
from .retrieval_head import RetrievalHeadSection
from .sections import (
    Choice,
    HeadTaxonomy,
    LayerErrors,
    Measured,
    MemoryModel,
    ModelFacts,
    ProfileInfo,
    Provenance,
    RetrievalHeads,
    SekvSection,
    SiteFacts,
    SketchSection,
)
from .sentences import SentenceSection

__all__ = [
    "Choice",
    "HeadTaxonomy",
    "LayerErrors",
    "Measured",
    "MemoryModel",
    "ModelFacts",
    "Profile",
    "ProfileInfo",
    "Provenance",
    "RetrievalHeadSection",
    "RetrievalHeads",
    "SekvSection",
    "SentenceSection",
    "SiteFacts",
    "SketchSection",
]
