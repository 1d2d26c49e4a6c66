// Browsers start no workers for pages that are opened as files. The search of the site is a worker: run it in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const scope = frame.contentWindow
      scope.document.open()
      scope.document.write("<!doctype html><body></body>")
      scope.document.close()
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script")
          script.src = source
          script.onload = resolve
          script.onerror = () => reject(new Error(`cannot load ${source}`))
          scope.document.body.append(script)
        })
      scope.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      scope.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      this.scope = scope
      this.ready = load(url)
      this.ready.catch((error) => this.dispatchEvent(new ErrorEvent("error", { error, message: error.message })))
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })))
    }

    terminate() {
      this.scope.frameElement.remove()
    }
  }
}
