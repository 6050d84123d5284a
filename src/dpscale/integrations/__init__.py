"""dpscale inside other training libraries; each module needs the extra of its name."""
