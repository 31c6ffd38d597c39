"""The command line with the extra ``loaders``: index a PDF file, a Word document and reStructuredText."""

import subprocess
import sys
from pathlib import Path

import docx
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

papers = Path("papers")
papers.mkdir()
(papers / "zorval.rst").write_text("Zorval\n======\n\nZorval makes *clocks*.\n")
document = docx.Document()
document.add_paragraph("Tenrik makes ships.")
document.save(str(papers / "tenrik.docx"))
content = DecodedStreamObject()
content.set_data(b"BT /F1 12 Tf (Moklun makes bread.) Tj ET")
writer = PdfWriter()
page = writer.add_blank_page(100, 100)
names = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
font = DictionaryObject({NameObject(key): NameObject(value) for key, value in names.items()})
fonts = DictionaryObject({NameObject("/F1"): font})
page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
page[NameObject("/Contents")] = content
writer.encrypt("", "owner", algorithm="AES-256")
writer.write(papers / "moklun.pdf")
ragcache = Path(sys.executable).with_name("ragcache")
told = subprocess.check_output([ragcache, "index", papers, "--store", "papers.store"], text=True)
assert "3 documents added" in told, told
