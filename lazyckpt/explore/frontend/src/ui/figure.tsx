// The frame of a picture: its title, what it shows, and how to save it.

import type { ComponentChildren, RefObject } from "preact";
import { useRef } from "preact/hooks";
import { useExplorer } from "../context";
import { Python } from "./python";
import { savePng, saveSvg, type Saved } from "./savepicture";
import { shownName, shownTensor } from "./text";
import "./figure.css";

interface Props {
  title: string;
  /** The name of the tensor that it is of, for saved pictures: the page has it elsewhere. */
  of?: string;
  /** What it shows, with units. */
  note?: ComponentChildren;
  /** Name of a saved file. */
  name: string;
  /** The Python call that gives the same; several for what has parts. */
  python?: string | undefined | (string | undefined)[];
  /** Further controls beside the title. */
  tools?: ComponentChildren;
  children: ComponentChildren;
}

interface SaveProps {
  /** The element with the picture: an svg or a canvas. */
  of: RefObject<HTMLElement | null>;
  /** Name of a saved file. */
  name: string;
  /** The title of a saved picture, and lines below it. */
  head(): string[];
  /** Where the page says what the colours stand for, if not beside the picture: a selector. */
  legend?: string;
}

/** Buttons that save the picture in an element. */
export function SaveButtons({ of, name, head, legend }: SaveProps) {
  const { about } = useExplorer();
  const button = (kind: string, save: (name: string, saved: Saved) => unknown) => (
    <button
      type="button"
      class="small"
      aria-label={`save ${shownName(name, 60)} as ${kind}`}
      onClick={() => {
        const body = of.current!;
        const picture = body.querySelector<SVGSVGElement>("svg.picture") ?? body.querySelector("canvas");
        if (!picture) return;
        const legends = legend ? body.closest(".lazyckpt-explorer")!.querySelectorAll(legend) : body.querySelectorAll("[data-legend]");
        void save(name, { picture, head: [...head(), shownName(about.title)], legends: [...legends] });
      }}
    >
      {kind}
    </button>
  );
  return (
    <span class="figure-save">
      {button("PNG", savePng)}
      {button("SVG", saveSvg)}
    </span>
  );
}

/** A picture (an svg or a canvas among the children) with a title, buttons that save it, and its Python call. */
export function Figure({ title, of, note, name, python, tools, children }: Props) {
  const body = useRef<HTMLDivElement>(null);
  const noted = useRef<HTMLSpanElement>(null);
  const head = () => [title, of === undefined ? "" : shownTensor(of), noted.current ? textOf(noted.current) : ""];
  return (
    <figure class="figure">
      <figcaption>
        <h2>{title}</h2>
        {note && (
          <span class="quiet" ref={noted}>
            {note}
          </span>
        )}
        <span class="figure-tools">
          {tools}
          <SaveButtons of={body} name={name} head={head} />
        </span>
      </figcaption>
      <div ref={body} class="figure-body">
        {children}
      </div>
      {[python].flat().map((code, n) => (
        <Python key={n} code={code} />
      ))}
    </figure>
  );
}

/** The text of a note without what speaks of the page: a saved picture cannot be clicked. */
function textOf(note: Element): string {
  const copy = note.cloneNode(true) as Element;
  for (const hint of copy.querySelectorAll("[data-hint]")) hint.remove();
  return copy.textContent ?? "";
}
