"""Who is alive: silent nodes go offline, dead web processes give their counts back."""
