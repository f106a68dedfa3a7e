// Columns sort on their header's button: descending first, then ascending; rows without a number stay last.
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const header = button.closest("th"), table = button.closest("table"), body = table.tBodies[0];
  const column = Number(header.dataset.column);
  const order = header.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
  table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", order);
  const value = (row) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.classList.contains("missing") || !cell.textContent ? null : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const rows = [...body.rows].map((row) => [value(row), row]);
  rows.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : compare(a, b) * (order === "ascending" ? 1 : -1)));
  rows.forEach(([, row]) => body.append(row));
}));
