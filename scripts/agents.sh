#!/usr/bin/env bash
# Installs the newest coding agents of npm into build/agents, for `make test-agents`; needs npm.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v npm >/dev/null || { echo "npm is missing; install Node.js 20 or newer." >&2; exit 1; }
mkdir -p build/agents
cd build/agents
[ -f package.json ] || echo '{"private": true}' >package.json
npm install --no-audit --no-fund --loglevel=error @openai/codex@latest @anthropic-ai/claude-code@latest opencode-ai@latest
npm ls --depth=0
