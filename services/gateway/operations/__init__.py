"""Operations: what APIs do for a caller, whatever transport the caller uses."""
