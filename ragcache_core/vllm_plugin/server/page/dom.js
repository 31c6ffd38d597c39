// Elements and figures. Texts become text nodes: nothing that the server says is ever read as HTML.

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [property, value] of Object.entries(properties)) {
    if (property in made) made[property] = value;
    else made.setAttribute(property, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const byId = (id) => document.getElementById(id);

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function bytes(number) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; number >= 1024 && at < names.length - 1; at += 1) number /= 1024;
  return `${number >= 100 || at === 0 ? Math.round(number) : number.toFixed(1)} ${names[at]}`;
}

export function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 0.0995) return `${(number * 1000).toFixed(1)} ms`;
  return number < 1 ? `${Math.round(number * 1000)} ms` : `${number.toFixed(number < 10 ? 2 : 0)} s`;
}

export function percent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

// A bar of parts [share of the whole, class, what it is].
export function bar(parts, className = "bar") {
  const made = el("div", { className });
  for (const [share, kind, title] of parts) {
    const part = el("span", { className: `fill ${kind}`, title });
    part.style.width = `${Math.max(0, Math.min(share, 1)) * 100}%`;
    made.append(part);
  }
  return made;
}

// A line of shares from 0 to 1, the latest at the right.
export function spark(shares, kind, label, length) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${length - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", `spark ${kind}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const line = document.createElementNS(space, "polyline");
  const first = length - shares.length;
  line.setAttribute("points", shares.map((share, i) => `${first + i},${(19 - 18 * share).toFixed(2)}`).join(" "));
  svg.append(line);
  return svg;
}

export function tierBadges(tiers) {
  return tiers.map((tier) => el("span", { className: `badge ${tier}` }, tier));
}
