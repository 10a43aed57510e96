//! Streams and events.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::device::current;
use crate::argument::{Out, answer};
use crate::event::{EVENTS, Event};
use crate::handles::Handle;
use crate::stream;

#[unsafe(no_mangle)]
extern "C" fn hipStreamCreateWithFlags(created: Out<Handle>, _flags: c_uint) -> c_int {
    answer("hipStreamCreateWithFlags", || created.set(stream::create(current()?)?))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamDestroy(handle: Handle) -> c_int {
    answer("hipStreamDestroy", || stream::destroy(handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamQuery(handle: Handle) -> c_int {
    answer("hipStreamQuery", || stream::of(handle, current()?)?.query())
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamSynchronize(handle: Handle) -> c_int {
    answer("hipStreamSynchronize", || {
        let device = current()?;
        stream::of(handle, device)?.wait();
        device.works()
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamWaitEvent(handle: Handle, event: Handle, _flags: c_uint) -> c_int {
    answer("hipStreamWaitEvent", || {
        let event = EVENTS.get(event)?;
        let stream = stream::of(handle, current()?)?;
        stream.push(Box::new(move || {
            event.wait();
            Ok(())
        }));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipEventCreateWithFlags(created: Out<Handle>, _flags: c_uint) -> c_int {
    answer("hipEventCreateWithFlags", || {
        current()?;
        created.set(EVENTS.add(Arc::new(Event::default())))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipEventDestroy(handle: Handle) -> c_int {
    answer("hipEventDestroy", || EVENTS.remove(handle).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn hipEventRecord(event: Handle, handle: Handle) -> c_int {
    answer("hipEventRecord", || {
        let stream = stream::of(handle, current()?)?;
        EVENTS.get(event)?.record(&stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipEventQuery(event: Handle) -> c_int {
    answer("hipEventQuery", || {
        let device = current()?;
        let event = EVENTS.get(event)?;
        event.query()?;
        // What came before it may have broken the device since.
        device.works()
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipEventSynchronize(event: Handle) -> c_int {
    answer("hipEventSynchronize", || {
        let device = current()?;
        EVENTS.get(event)?.wait();
        device.works()
    })
}
