"""Plan a calibration: the kind that serves the method's spec, checked before the model runs."""

from __future__ import annotations

from kvq_cli.calibration.kinds.base import CalibrationPlan
from kvq_cli.calibration.kinds.codebooks import CodebookPlan
from kvq_cli.calibration.kinds.factors import FactorPlan, LowRankPlan
from kvq_cli.calibration.kinds.joined import JoinedPlan
from kvq_cli.calibration.kinds.mixed import MixedPlan
from kvq_cli.calibration.kinds.rotations import RotationPlan
from kvq_cli.calibration.kinds.transforms import TransformPlan
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.methods.base import Method
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.methods.rotation_spec import RotationSpec
from kvq_cli.methods.specs import CalibrationSpec, FactorSpec, LowRankSpec, Spec
from kvq_cli.methods.transform_specs import MixedSpec, TransformSpec
from kvq_cli.models import LoadedModel

KINDS: dict[type[Spec], type[CalibrationPlan]] = {
    CalibrationSpec: CodebookPlan,
    TransformSpec: TransformPlan,
    MixedSpec: MixedPlan,
    FactorSpec: FactorPlan,
    LowRankSpec: LowRankPlan,
    RotationSpec: RotationPlan,
    JoinedSpec: JoinedPlan,
}


def plan_calibration(loaded: LoadedModel, method: Method, options: CalibrationOptions) -> CalibrationPlan:
    """Check the request and fill in defaults.

    Raises UsageError for bits, head_dim, disk space and sizes that cannot work; KvqError where a package is missing.
    """
    return KINDS[type(method.calibration(loaded.shape))].make(loaded, method, options)
