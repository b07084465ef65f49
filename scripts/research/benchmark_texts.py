"""Last used 2026-11-26, for scripts/research/logs/heads.md.

Make the texts of the benchmark of heads, out of packages of Debian that anyone can install.

    python scripts/research/benchmark_texts.py FOLDER --parts dev test  # FOLDER/dev and FOLDER/test, a .txt file for each package
    python scripts/research/benchmark_texts.py FOLDER                    # every part, the training texts too
    python scripts/research/overlap.py pydoc wording FOLDER/dev --against FOLDER/dev FOLDER/test

Settings are chosen on ``dev``; what is reported is measured on ``test``, and ``later`` is for heads whose settings were chosen
when ``test`` was known; ``latest`` for what was settled when ``later`` was, ``newest`` when ``latest`` was, and ``unseen`` when
``newest`` was. Packages are downloaded by apt and unpacked into a temporary folder: nothing is installed and no root is needed,
and no script of theirs runs. The files' hashes are printed, and rows name the hash of the text that they were made of.
HTML needs ``pip install -e '.[documents]'``.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from locret_kit.files import write_text
from locret_kit.text.reader import read_document


@dataclass(frozen=True)
class Source:
    """A text of one of Debian's packages."""

    package: str
    files: str
    """Its files below the package's root, as a pattern; they are joined by name."""
    says: str


PARTS = {
    "dev": (
        Source("debian-reference-en", "usr/share/debian-reference/debian-reference.en.txt.gz", "a manual"),
        Source("dict-devil", "usr/share/dictd/devil.dict.dz", "Ambrose Bierce, The Devil's Dictionary"),
    ),
    "test": (
        Source("debian-policy", "usr/share/doc/debian-policy/policy.txt.gz", "rules and their reasons"),
        Source("anarchism", "usr/share/doc/anarchism/html/sec[A-E]*.html", "An Anarchist FAQ: essays"),
    ),
    "later": (
        Source("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/*.html", "a book for administrators"),
        Source("gimp-help-en", "usr/share/gimp/2.0/help/en/*.html", "a manual of an image editor"),
    ),
    "latest": (
        Source("debian-history", "usr/share/doc/debian-history/docs/*.en.html", "a project's history"),
        Source("mh-book", "usr/share/doc/mh-book/html/**/*.html", "a book on programs for mail"),
    ),
    "newest": (
        Source("debian-faq", "usr/share/doc/debian/FAQ/*.en.html", "questions and answers"),
        Source("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html/*.html", "a database's manual"),
    ),
    "unseen": (
        Source("cfi-en", "usr/share/doc/cfi-en/html/ch*web.htm", "a book about copyright and hackers: essays"),
        Source("dict-foldoc", "usr/share/dictd/foldoc.dict.dz", "a dictionary of computing"),
        Source("postfix-doc", "usr/share/doc/postfix/html/*_README.html", "a mail server's manual"),
    ),
    "train": (
        Source("apache2-doc", "usr/share/doc/apache2-doc/manual/en/**/*.html", "a web server's manual"),
        Source("aptitude-doc-en", "usr/share/doc/aptitude/html/en/*.html", "a package manager's manual"),
        Source("developers-reference", "usr/share/developers-reference/_sources/*.txt", "advice to maintainers"),
        Source("dict-wn", "usr/share/dictd/wn.dict.dz", "WordNet, a dictionary"),
        Source("exim4-doc-html", "usr/share/doc/exim4-doc-html/spec_html/*.html", "a mail server's manual"),
        Source("git-doc", "usr/share/doc/git-doc/**/*.txt", "manual pages"),
        Source("gnucash-docs", "usr/share/doc/gnucash-docs/gnucash-guide-en/*.html", "a guide to bookkeeping"),
        Source("libreoffice-help-en-us", "usr/share/libreoffice/help/en-US/text/swriter/**/*.html", "help pages"),
        Source("lilypond-doc-html", "usr/share/doc/lilypond/html/Documentation/[elmnw]*/*.html", "music notation"),
        Source("maint-guide", "usr/share/doc/maint-guide/html/*.html", "a tutorial"),
        Source("octave-doc", "usr/share/doc/octave/octave.html/*.html", "a manual of numerical methods"),
        Source("perl-doc", "usr/share/perl/*/pod/perl[a-f]*.pod", "a language's manual"),
        Source("sqlite3-doc", "usr/share/doc/sqlite3/*.html", "a database's manual"),
        Source("vim-doc", "usr/share/doc/vim/html/*.html", "an editor's manual"),
        Source("zsh-doc", "usr/share/doc/zsh-common/html/*.html", "a shell's manual"),
    ),
}
"""For evaluation two or three texts in each part, of prose and of other kinds; the public domain or licences of free software."""


def text_of(file: Path) -> str:
    """The text of a plain, a compressed or an HTML file."""
    if file.suffix in (".gz", ".dz"):
        return gzip.decompress(file.read_bytes()).decode("utf-8")
    return file.read_text("utf-8") if file.suffix == ".pod" else read_document(file)


def make(source: Source, scratch: Path) -> str:
    """Download and unpack a package; its text.

    Raises:
        FileNotFoundError: the package has no such files. CalledProcessError: it cannot be had.
    """
    place = scratch / source.package
    place.mkdir()
    subprocess.run(["apt-get", "-qq", "download", source.package], cwd=place, check=True, stderr=subprocess.DEVNULL)
    (package,) = place.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package.name, "root"], cwd=place, check=True)
    files = sorted((place / "root").glob(source.files))
    if not files:
        raise FileNotFoundError(f"package {package.name} has no {source.files}")
    return "\n\n".join(text_of(file).strip() for file in files) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="by default all")
    args = parser.parse_args(argv)
    try:
        with TemporaryDirectory() as scratch:
            for part in args.parts:
                (args.folder / part).mkdir(parents=True, exist_ok=True)
                for source in PARTS[part]:
                    text, path = make(source, Path(scratch)), args.folder / part / f"{source.package}.txt"
                    write_text(path, text)
                    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                    print(f"{path}: {len(text):,} characters, {digest} ({source.says})")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"benchmark_texts.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
