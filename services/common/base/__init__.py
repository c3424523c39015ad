"""What everything else uses: errors, tasks, logs, budgets, packed numbers, shared steps, texts."""
