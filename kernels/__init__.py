"""Ops of Yuan 2.0 models with hand-written backward passes; `ops` has one public function per op."""
