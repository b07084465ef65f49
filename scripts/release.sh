#!/usr/bin/env bash
# Build distributions and site, and try them out: what is in them, a fresh environment, the first commands; then say what would be
# published. With --publish it is: the distributions on the package index, the site on the branch gh-pages, a tag of the version.
# Usage: scripts/release.sh [--publish]
#
# The fresh environment has the wheel alone; its dependencies are those of the active environment (a .pth file leads to them), so that
# nothing large is fetched. FETCH=1 installs them from the index instead, as a user's pip would.
# The first commands run with the demo model of checkpoints/ (scripts/fetch_backbone.py).
set -euo pipefail

case "${1:-}" in
"" | --publish) ;;
*) echo "usage: scripts/release.sh [--publish]" >&2; exit 2 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(command -v python)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$root"

echo "== changelog" >&2
version="$("$python" -c 'import locret_kit; print(locret_kit.__version__)')"
changes="$(sed -n "/^## \\[\\?$version/,/^## /p" CHANGELOG.md | sed '$d')"
[ -n "$changes" ] || { echo "CHANGELOG.md has nothing of $version" >&2; exit 1; }

echo "== site" >&2
"$python" -m mkdocs build --strict --quiet --site-dir "$work/site"

echo "== build" >&2
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build twine
git ls-files -z | tar --null --files-from=- -cf - | (mkdir "$work/source" && tar -xf - -C "$work/source") # what git has, no more
"$work/tools/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { tail -30 "$work/build.log" >&2; exit 1; }
ls -l "$work/dist" >&2
"$work/tools/bin/twine" check --strict "$work/dist"/*

echo "== contents" >&2
"$python" scripts/check_release.py "$work/dist"

echo "== install" >&2
"$python" -m venv "$work/fresh"
if [ -n "${FETCH:-}" ]; then
    "$work/fresh/bin/pip" install --quiet "$work/dist"/*.whl
else
    "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$work/dependencies.pth"
    cp "$work/dependencies.pth" "$("$work/fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    "$work/fresh/bin/pip" install --quiet --no-deps --force-reinstall "$work/dist"/*.whl
fi
cd "$work" # not the checkout
unset PYTHONPATH
"$work/fresh/bin/python" -c '
import locret_kit, locret_kernels, locret_recipes, locret_examples
for module in (locret_kit, locret_kernels, locret_recipes, locret_examples):
    assert "/fresh/" in module.__file__, module.__file__
'
for command in "$work/fresh/bin"/locret-*; do
    "$command" --version
    "$command" --help >/dev/null
done

echo "== the first commands" >&2
model="$root/checkpoints/SmolLM2-135M-Instruct"
mkdir -p "$work/cache/locret_kit" && ln -s "$model" "$work/cache/locret_kit/" # as a first run leaves it there
export XDG_CACHE_HOME="$work/cache"
"$work/fresh/bin/python" "$root/scripts/make_long_text.py" --tokens 1024 --document-only >long.txt 2>expected
key="$(sed -n 's/expected answer: \([0-9]*\).*/\1/p' expected)"
"$work/fresh/bin/locret-infer" long.txt --question "What is the pass key?" --budget 512 --max-new-tokens 16 --quiet | tee answer
grep -q "$key" answer || { echo "the answer is not $key" >&2; exit 1; }
"$work/fresh/bin/locret-infer" long.txt --model "$model" --plugin locret_examples.value_attention --policy value-attention \
    --budget 512 --max-new-tokens 2 --quiet
"$work/fresh/bin/locret-plan" --model phi3-mini --gpu-memory 24GiB --context 131072 | tail -1

cd "$root"
publish=("$work/tools/bin/twine upload $work/dist/*" "$python -m mkdocs gh-deploy --strict" "git tag -a v$version -m 'Release $version'")
if [ "${1:-}" = --publish ]; then
    for step in "${publish[@]}"; do bash -c "$step"; done
else
    printf '== would be published: version %s\n%s\n' "$version" "$changes" >&2
    printf '%s\n' "${publish[@]}" >&2
fi
