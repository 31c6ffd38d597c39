// The knowledge tree as a picture: a column for each step of a path, as high as what it takes; coloured by tier.

import { byId, bytes, count, el } from "./dom.js";

const TIERS = ["gpu", "host", "disk"];
const LEAST_HIGH = 3;
const LEAST_WIDE = 90;

export class TreePicture {
  constructor() {
    this.box = byId("tree");
    this.nodes = new Map();
    this.top = null;
    this.focused = null;
    this.size = "num_tokens";
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("click", (event) => this.zoom(this.nodeAt(event.target)));
    this.box.addEventListener("mouseover", (event) => this.describe(this.nodeAt(event.target)));
    this.box.addEventListener("focusin", (event) => {
      const node = this.nodeAt(event.target);
      if (node) this.focused = node.node;
      this.describe(node);
    });
    byId("size").addEventListener("change", (event) => {
      this.size = event.target.value;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Take in what an engine tells of its tree. Nodes that are gone are left, those that stay keep zoom and focus.
  show(view) {
    this.view = view;
    this.nodes = new Map(view.nodes.map((node) => [node.node, { ...node, children: [] }]));
    this.roots = [];
    for (const node of this.nodes.values()) {
      const parent = this.nodes.get(node.parent);
      (parent ? parent.children : this.roots).push(node);
    }
    if (!this.nodes.has(this.top)) this.top = null;
    this.draw();
  }

  draw() {
    if (!this.view) return;
    const hadFocus = this.box.contains(document.activeElement);
    for (const node of [...this.nodes.values()].reverse()) {
      const below = node.children.reduce((sum, child) => sum + child.weight, 0);
      node.weight = Math.max(node[this.size], below, 1);
    }
    const tops = this.top === null ? this.roots : [this.nodes.get(this.top)];
    this.cells = [];
    this.numTiny = 0;
    this.place(tops, 0, 0, this.box.clientHeight);
    const depth = Math.max(1, ...this.cells.map((cell) => cell.column + 1));
    const wide = Math.max(this.box.clientWidth / depth, LEAST_WIDE);
    for (const cell of this.cells) cell.element = element(cell, wide);
    this.box.replaceChildren(...this.cells.map((cell) => cell.element));
    const focusable = this.cells.find((cell) => cell.node.node === this.focused) ?? this.cells[0];
    if (focusable) {
      focusable.element.tabIndex = 0;
      if (hadFocus) focusable.element.focus({ preventScroll: true });
    }
    this.drawCrumbs();
    const { num_nodes: all, num_left_out: out } = this.view;
    const tiny = this.numTiny ? ` ${count(this.numTiny)} are too small to see here: zoom in.` : "";
    byId("tree-note").textContent = all
      ? `${count(all - out)} of ${count(all)} nodes, the most used.${tiny} Edges at the right: lies in slower tiers as well.`
      : "Nothing is cached yet.";
    if (!this.focused) byId("node").textContent = "";
  }

  place(nodes, column, from, high) {
    const all = nodes.reduce((sum, node) => sum + node.weight, 0);
    let top = from;
    for (const node of [...nodes].sort((one, other) => other.weight - one.weight)) {
      const own = (high * node.weight) / all;
      if (own < LEAST_HIGH) {
        this.numTiny += countOf(node);
        continue;
      }
      this.cells.push({ node, column, top, high: own });
      this.place(node.children, column + 1, top, own);
      top += own;
    }
  }

  drawCrumbs() {
    const path = [];
    for (let node = this.nodes.get(this.top); node; node = this.nodes.get(node.parent)) path.unshift(node);
    const steps = [[null, "whole tree"], ...path.map((node) => [node.node, nameOf(node)])];
    byId("crumbs").replaceChildren(
      ...steps.map(([node, name], i) => {
        const button = el("button", { type: "button", title: name }, name);
        if (i === steps.length - 1) button.setAttribute("aria-current", "true");
        button.addEventListener("click", () => this.zoomTo(node));
        return button;
      }),
    );
  }

  zoom(node) {
    if (node?.children.length) this.zoomTo(node.node);
  }

  zoomTo(top) {
    this.top = top;
    if (top !== null) this.focused = top;
    this.draw();
  }

  nodeAt(element) {
    return this.nodes.get(Number(element.closest("[data-node]")?.dataset.node));
  }

  describe(node) {
    if (node) byId("node").textContent = describe(node);
  }

  onKey(event) {
    const at = this.cells?.find((cell) => cell.node.node === this.focused) ?? this.cells?.[0];
    if (!at) return;
    const sameColumn = this.cells.filter((cell) => cell.column === at.column).sort((a, b) => a.top - b.top);
    const place = sameColumn.indexOf(at);
    const cellOf = (id) => this.cells.find((cell) => cell.node.node === id);
    const moves = {
      ArrowRight: () => this.cells.find((cell) => cell.node.parent === at.node.node),
      ArrowLeft: () => cellOf(at.node.parent),
      ArrowDown: () => sameColumn[place + 1],
      ArrowUp: () => sameColumn[place - 1],
    };
    if (moves[event.key]) moves[event.key]()?.element.focus();
    else if (event.key === "Enter" || event.key === " ") this.zoom(at.node);
    else if (event.key === "Escape") this.zoomTo(this.nodes.get(this.top)?.parent ?? null);
    else return;
    event.preventDefault();
    this.focused = this.nodeAt(document.activeElement)?.node ?? this.focused;
    for (const cell of this.cells) cell.element.tabIndex = cell.node.node === this.focused ? 0 : -1;
  }
}

function element({ node, column, top, high }, wide) {
  const tiers = TIERS.filter((tier) => node.num_bytes[tier]);
  const slower = tiers.slice(1).map((tier, i, all) => {
    const edge = el("i", { className: tier });
    edge.style.right = `${(all.length - 1 - i) * 5}px`;
    return edge;
  });
  const kinds = [tiers[0], node.doc_id === null ? "nameless" : "", node.children.length ? "leads" : ""];
  const made = el(
    "div",
    { className: kinds.join(" "), role: "treeitem", tabIndex: -1, "aria-level": column + 1, "aria-label": describe(node) },
    high >= 17 ? nameOf(node) : "",
    ...slower,
  );
  made.dataset.node = node.node;
  Object.assign(made.style, { left: `${column * wide}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px` });
  return made;
}

function nameOf(node) {
  return node.doc_id ?? (node.parent === null ? "beginning of prompts" : "question, answer");
}

function describe(node) {
  const tiers = TIERS.filter((tier) => node.num_bytes[tier]).map((tier) => `${tier} ${bytes(node.num_bytes[tier])}`);
  return `${nameOf(node)}: ${count(node.num_tokens)} tokens, ${count(node.num_uses)} requests, ${tiers.join(", ")}`;
}

function countOf(node) {
  return 1 + node.children.reduce((sum, child) => sum + countOf(child), 0);
}
