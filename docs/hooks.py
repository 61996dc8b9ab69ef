"""Links of the manual to files of the repository, which the site does not hold."""

import re
from pathlib import Path

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown, page, config, **_):
    """The text of a page whose links out of docs/ lead to the repository, or are plain text where it has no address.

    A link to a file that does not exist stays, so that a strict build refuses it.
    """
    docs = Path(config.docs_dir).resolve()
    root, folder = docs.parent, Path(page.file.abs_src_path).parent

    def outside(link):
        if re.match(r"[a-z]+:", link["target"]):
            return link[0]
        path = (folder / link["target"]).resolve()
        if (path.is_relative_to(docs) and path.is_file()) or not path.exists():
            return link[0]
        if not config.repo_url:
            return link["text"]
        return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{path.relative_to(root)})"

    return _LINK.sub(outside, markdown)
