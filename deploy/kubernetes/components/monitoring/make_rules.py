"""Makes rules.yaml of the alert rules in deploy/observability: kustomize takes no file from outside its folder.

python deploy/kubernetes/components/monitoring/make_rules.py
"""

from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "observability" / "rules" / "sluice.yaml"
HEAD = """# Made by make_rules.py of deploy/observability/rules/sluice.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sluice
  labels: {app.kubernetes.io/part-of: sluice}
spec:
"""


def rules() -> str:
    """The file's text."""
    lines = [line for line in SOURCE.read_text().splitlines() if not line.startswith("#")]
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    (HERE / "rules.yaml").write_text(rules())
