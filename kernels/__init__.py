"""Operations of Yuan 2.0 models with their own backward passes; `ops` has one public function per op."""
