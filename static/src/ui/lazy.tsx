// Code that is loaded when it is needed. If it does not come, because the server is gone or has a newer page, its
// place says so; the rest goes on, with everything typed in it.
import { lazy, type ComponentType, type LazyExoticComponent, type ReactNode } from "react";
import { Button } from "./button";
import { Dialog } from "./dialog";
import { PageHead } from "./title";

const TITLE = "Could not load this part of the page";

function Reload(): ReactNode {
  return (
    <>
      <p>The server is unreachable, or a new version of this page is available. Reloading the page helps in both cases.</p>
      <div>
        <Button kind="primary" onClick={() => window.location.reload()}>
          Reload
        </Button>
      </div>
    </>
  );
}

/** In the place of a page whose code is missing. */
export function MissingPage(): ReactNode {
  return (
    <>
      <PageHead title={TITLE} />
      <Reload />
    </>
  );
}

function MissingDialog({ onClose }: { onClose: () => void }): ReactNode {
  return (
    <Dialog open onClose={onClose} title={TITLE}>
      <Reload />
    </Dialog>
  );
}

interface Module {
  Component: ComponentType;
}

/** A page's `lazy` for the routes. */
export function lazyPage(load: () => Promise<ComponentType>): () => Promise<Module> {
  // The router shows nothing at all for a page whose code failed to load, so it never fails.
  return () =>
    load().then(
      (Component) => ({ Component }),
      () => ({ Component: MissingPage }),
    );
}

/** A dialog whose code is loaded when it is first shown; wants a `Suspense` around it. */
export function lazyDialog<Props extends { onClose: () => void }>(
  load: () => Promise<ComponentType<Props>>,
): LazyExoticComponent<ComponentType<Props>> {
  return lazy(() =>
    load().then(
      (loaded) => ({ default: loaded }),
      () => ({ default: MissingDialog as ComponentType<Props> }),
    ),
  );
}
