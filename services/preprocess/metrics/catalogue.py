"""The catalogue of what preprocess measures; its instruments are declared where they are made."""

from services.common.observability.declarations import MetricDeclarations

METRICS = MetricDeclarations("preprocess")
