"""Where rows lie: plain, ragged, quantised, and both, one layer each."""
