"""The operations of expressions, by families. `core.expr.op_of` finds them by name."""
